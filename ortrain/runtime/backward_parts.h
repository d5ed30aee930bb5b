// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "ortrain/runtime/execution_plan.h"

namespace ortrain {

// A stretch of the backward, with the gradients that are final when it ends.
struct BackwardPart {
  size_t end = 0;                 // behind its last step of the plan
  std::vector<size_t> gradients;  // positions among the outputs with role `gradient`
};

// Cuts the backward of a plan into parts, each with `bytes` of final gradients or more, but the
// last, which holds what is left and ends with the plan's last step. Every gradient is in one part.
std::vector<BackwardPart> backward_parts(const Graph& graph, const ExecutionPlan& plan,
                                         size_t bytes);

}  // namespace ortrain
