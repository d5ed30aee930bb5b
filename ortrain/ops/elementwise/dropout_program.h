// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/ir/node_program.h"

namespace ortrain::ops {

// The program of a standard Dropout node; ours is an elementwise operator.
ExprProgram onnx_dropout_program(const NodeSpec& spec);

}  // namespace ortrain::ops
