// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "ortrain/ir/expr_program.h"
#include "ortrain/runtime/kernel.h"

namespace ortrain::cpu {

// Builds the expression program of a node: its inputs are the node's present inputs in order, its
// outputs the node's wanted outputs in order.
using ProgramOfNode = std::function<ExprProgram(const NodeSpec&)>;

// Kernels that run the program of a node: "simd", then "ref" (ir/expr_interpreter.h), which takes
// every type. An output may take the memory of an input of its type and shape.
std::vector<Kernel> expr_kernels(ProgramOfNode program_of);

// The program of an elementwise node from OpDef::expression.
ExprProgram elementwise_program(const NodeSpec& spec);

}  // namespace ortrain::cpu
