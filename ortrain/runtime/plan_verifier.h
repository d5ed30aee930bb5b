// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "ortrain/runtime/execution_plan.h"

namespace ortrain {

// What a step may touch behind each of its addresses.
struct StepBytes {
  std::vector<size_t> inputs;
  std::vector<size_t> outputs;
  size_t workspace = 0;
};

// Follows which value each byte of a plan's memory holds, from the graph, the sizes, what kernels
// say of views and of operands that they may overwrite, and nothing else of what made the plan.
// With ORTRAIN_VERIFY=1 every plan is followed when it is made. Throws InternalError where
//   - bytes of a value are not the exact product of its extents,
//   - an address reaches out of its arena, block, input or constant, or is not aligned,
//   - a step reads bytes that another value, or another part of the value, has taken since, that
//     nobody has written, or that its phase does not have yet,
//   - a step writes to a constant, to an input that the value does not update, to a block of the
//     other phase,
//   - results or the workspace of a step lie over each other, or over inputs that its kernel does
//     not let them lie over,
//   - an output is not there, whole, at the end of its phase, or when it is said to be final.
//
//   arena  |....a a a|b b b b|....    a step that reads `a` here finds `a`, from its byte 0 on
std::vector<StepBytes> verify_plan(const Graph& graph, const std::vector<Dims>& input_dims,
                                   const ExecutionPlan& plan);

}  // namespace ortrain
