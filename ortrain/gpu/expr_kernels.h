// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/ir/node_program.h"
#include "ortrain/runtime/device.h"
#include "ortrain/runtime/kernel.h"

namespace ortrain::gpu {

// Kernels that run the expression program of a node on `device`: "generated", printed as source and
// compiled while the plan is made (runtime_compiler.h), where there is a compiler; then
// "interpreted", which needs none. An output may take the memory of an input of its type and shape.
std::vector<Kernel> expr_kernels(ProgramOfNode program_of, Device& device);

}  // namespace ortrain::gpu
