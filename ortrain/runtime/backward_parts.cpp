// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/backward_parts.h"

#include <algorithm>

namespace ortrain {

namespace {

// Something that is final behind a step.
struct Result {
  size_t end, position, bytes;
};

// Calls `part(end, positions)` for stretches of steps with `bytes` of results or more, but the
// last.
template <class Part>
void cut(std::vector<Result> results, size_t bytes, size_t last_end, const Part& part) {
  std::ranges::stable_sort(results, {}, &Result::end);
  std::vector<size_t> positions;
  size_t held = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    positions.push_back(results[i].position);
    held += results[i].bytes;
    const bool is_last = i + 1 == results.size();
    if (!is_last && held >= bytes && results[i + 1].end != results[i].end) {
      part(results[i].end, std::move(positions));
      positions.clear();
      held = 0;
    }
  }
  part(last_end, std::move(positions));
}

}  // namespace

std::vector<BackwardPart> backward_parts(const Graph& graph, const ExecutionPlan& plan,
                                         size_t bytes) {
  std::vector<Result> gradients;
  for (size_t k = 0; k < graph.outputs().size(); ++k) {
    if (graph.outputs()[k].role != OutputRole::gradient) continue;
    gradients.push_back({plan.output_steps[k].end, gradients.size(), plan.outputs[k].bytes()});
  }
  std::vector<BackwardPart> parts;
  cut(std::move(gradients), bytes, plan.steps.size(),
      [&](size_t end, std::vector<size_t> those) { parts.push_back({end, std::move(those)}); });
  return parts;
}

std::vector<FinishedUpdates> finished_updates(const Graph& graph, const ExecutionPlan& plan,
                                              size_t bytes) {
  std::vector<size_t> input_ends(graph.inputs().size(), 0);
  for (size_t s = 0; s < plan.num_forward_steps; ++s) {
    const PlanStep& step = plan.steps[s];
    const size_t count = size_t{step.num_inputs} + step.num_outputs;
    for (size_t a = 0; a < count; ++a) {
      const Location& location = plan.args[step.first_arg + a];
      if (location.kind == Location::Kind::input) input_ends[location.index] = s + 1;
    }
  }
  std::vector<Result> updates;
  for (size_t k = 0; k < graph.outputs().size(); ++k) {
    if (plan.updated_input[k] < 0) continue;
    const size_t end = input_ends[static_cast<size_t>(plan.updated_input[k])];
    updates.push_back({end, k, plan.outputs[k].bytes()});
  }
  std::vector<FinishedUpdates> stretches;
  cut(std::move(updates), bytes, plan.num_forward_steps,
      [&](size_t end, std::vector<size_t> those) { stretches.push_back({end, std::move(those)}); });
  return stretches;
}

BackwardReads backward_reads(const Graph& graph, const ExecutionPlan& plan) {
  std::vector<size_t> input_ends(graph.inputs().size(), 0);
  std::vector<size_t> output_ends(graph.outputs().size(), 0);
  for (size_t s = plan.num_forward_steps; s < plan.steps.size(); ++s) {
    const PlanStep& step = plan.steps[s];
    for (size_t a = 0; a < step.num_inputs; ++a) {
      const Location& location = plan.args[step.first_arg + a];
      if (location.kind == Location::Kind::input) input_ends[location.index] = s + 1;
      if (location.kind == Location::Kind::output) output_ends[location.index] = s + 1;
    }
  }
  BackwardReads reads;
  for (size_t i = 0; i < input_ends.size(); ++i) {
    if (input_ends[i] == 0 || graph.inputs()[i].role == InputRole::gradient) continue;
    reads.inputs.push_back({i, input_ends[i]});
  }
  for (size_t k = 0; k < output_ends.size(); ++k) {
    if (output_ends[k] == 0 || graph.outputs()[k].role == OutputRole::gradient) continue;
    reads.outputs.push_back({k, output_ends[k]});
  }
  return reads;
}

}  // namespace ortrain
