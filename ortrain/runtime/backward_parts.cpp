// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/backward_parts.h"

#include <algorithm>

namespace ortrain {

std::vector<BackwardPart> backward_parts(const Graph& graph, const ExecutionPlan& plan,
                                         size_t bytes) {
  struct Gradient {
    size_t end, position, bytes;
  };
  std::vector<Gradient> gradients;
  for (size_t k = 0; k < graph.outputs().size(); ++k) {
    if (graph.outputs()[k].role != OutputRole::gradient) continue;
    gradients.push_back({plan.output_steps[k].end, gradients.size(), plan.outputs[k].bytes()});
  }
  std::ranges::stable_sort(gradients, {}, &Gradient::end);
  std::vector<BackwardPart> parts(1);
  size_t held = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    parts.back().gradients.push_back(gradients[i].position);
    parts.back().end = gradients[i].end;
    held += gradients[i].bytes;
    const bool more_at_this_step =
        i + 1 < gradients.size() && gradients[i + 1].end == gradients[i].end;
    if (held >= bytes && !more_at_this_step && i + 1 < gradients.size()) {
      parts.emplace_back();
      held = 0;
    }
  }
  parts.back().end = plan.steps.size();
  return parts;
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
