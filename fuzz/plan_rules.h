// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "ortrain/runtime/execution_plan.h"

namespace ortrain::fuzz {

// What a step may touch behind each of its addresses.
struct StepBytes {
  std::vector<size_t> inputs;
  std::vector<size_t> outputs;
  size_t workspace = 0;
};

// Follows which value each byte of a plan's memory holds. Throws BrokenRule where
//   - bytes of a value are not the exact product of its extents,
//   - an address reaches out of its arena, block, input or constant,
//   - a step reads bytes that another value has taken since, or that nobody has written,
//   - results or the workspace of a step lie over each other or, but for one that starts at the
//     same byte, over its inputs.
// For plans that update nothing in place.
std::vector<StepBytes> check_plan(const Graph& graph, const std::vector<Dims>& input_dims,
                                  const ExecutionPlan& plan);

}  // namespace ortrain::fuzz
