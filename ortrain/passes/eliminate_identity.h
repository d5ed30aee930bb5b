// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/passes/pass.h"

namespace ortrain {

// Nodes that give back their input go away: Identity, Cast to the same type, Reshape, Expand, Tile
// or SumToShape to the same shape, Transpose in order, Concat and Sum of one, and pairs:
//
//   Transpose(q) ∘ Transpose(p)  =>  Transpose(p[q])        Reshape ∘ Reshape  =>  Reshape
Pass eliminate_identity();

// ortrain::StopGradient has done its work once gradients are built.
Pass eliminate_stop_gradient();

}  // namespace ortrain
