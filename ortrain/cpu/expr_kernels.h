// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/ir/node_program.h"
#include "ortrain/runtime/kernel.h"

namespace ortrain::cpu {

// Kernels that run the program of a node: "simd", then "ref" (ir/expr_interpreter.h), which takes
// every type. An output may take the memory of an input of its type and shape.
std::vector<Kernel> expr_kernels(ProgramOfNode program_of);

}  // namespace ortrain::cpu
