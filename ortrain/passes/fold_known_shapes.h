// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/passes/pass.h"

namespace ortrain {

// Shape arithmetic whose result inference knows becomes a constant.
//
//   Shape(x: float32[b, 128]) ─► Gather(1) ─► y     =>     constant 128 ─► y
Pass fold_known_shapes();

}  // namespace ortrain
