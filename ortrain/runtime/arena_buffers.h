// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "ortrain/ir/graph.h"
#include "ortrain/runtime/execution_plan.h"

namespace ortrain {

// Bytes of the arena that one buffer holds, and the steps of the plan during which it does, both
// ends included: a rectangle of the plan's picture, steps x bytes.
struct ArenaBuffer {
  ValueId value = kNoValue;  // the first value in it; kNoValue: a node's workspace
  int step = 0;              // that makes it, into ExecutionPlan::steps
  int last_step = 0;         // that reads it, or writes to it in place, for the last time
  size_t offset = 0;         // from the start of the arena
  size_t bytes = 0;
  int num_values = 1;  // results that took its memory one after the other, in place
};

// All buffers with bytes of their own, in the order of their first steps. It follows what the
// steps read and write, so it also shows what the planner's placement amounts to.
std::vector<ArenaBuffer> arena_buffers(const Graph& graph, const ExecutionPlan& plan);

}  // namespace ortrain
