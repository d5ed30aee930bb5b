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

}  // namespace ortrain
