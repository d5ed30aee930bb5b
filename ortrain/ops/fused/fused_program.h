// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/ir/node_program.h"

namespace ortrain::ops {

// The program in the attribute of a Fused node, with the outputs that are wanted.
ExprProgram fused_program(const NodeSpec& spec);

}  // namespace ortrain::ops
