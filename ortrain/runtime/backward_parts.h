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

// Updates of inputs, by position among the outputs, that are final behind a step of a plan.
struct FinishedUpdates {
  size_t end = 0;  // behind the step
  std::vector<size_t> outputs;
};

// What a plan that updates in place has written for good as its forward goes on, in stretches of
// `bytes` of updates or more, but the last, which ends with the forward's last step. Every output
// that is written where an input lies is in one.
std::vector<FinishedUpdates> finished_updates(const Graph& graph, const ExecutionPlan& plan,
                                              size_t bytes);

// Memory of the caller's that a backward reads.
struct CallersMemory {
  size_t index = 0;  // of the graph input or output
  size_t end = 0;    // behind the last step of the plan that reads it
};

// What the backward of a plan reads where the caller can write between forward and backward: of the
// graph's inputs and of what the forward gave out, through whatever shows their bytes at the plan's
// shapes. Gradients, which the backward takes and makes, are not in it.
struct BackwardReads {
  std::vector<CallersMemory> inputs;
  std::vector<CallersMemory> outputs;
};

BackwardReads backward_reads(const Graph& graph, const ExecutionPlan& plan);

}  // namespace ortrain
