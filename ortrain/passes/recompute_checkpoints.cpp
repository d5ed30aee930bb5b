// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/recompute_checkpoints.h"

#include <vector>

#include "ortrain/passes/recomputation.h"

namespace ortrain {
namespace {

size_t index_of(ValueId id) { return static_cast<size_t>(id); }

bool is_in_checkpoint(const Node& node) {
  return node.phase == Phase::forward && node.checkpoint != 0 && can_run_again(node);
}

// Those that live until the backward anyway: graph inputs, constants, and what another checkpoint
// or none at all reads, in the forward.
std::vector<bool> find_kept_values(const Graph& graph) {
  std::vector<bool> is_kept(graph.num_values(), true);
  for (size_t i = 0; i < is_kept.size(); ++i) {
    const Value& value = graph.value(static_cast<ValueId>(i));
    is_kept[i] = value.producer == kNoNode || !is_in_checkpoint(graph.node(value.producer));
  }
  for (NodeId id : graph.order()) {
    const Node& node = graph.node(id);
    if (node.phase != Phase::forward) continue;
    for (ValueId input : node.inputs) {
      if (input == kNoValue || is_kept[index_of(input)]) continue;
      const Node& producer = graph.node(graph.value(input).producer);
      if (producer.checkpoint != node.checkpoint) is_kept[index_of(input)] = true;
    }
  }
  for (const GraphOutput& output : graph.outputs()) is_kept[index_of(output.value)] = true;
  return is_kept;
}

}  // namespace

Pass recompute_checkpoints() {
  return {.name = "recompute_checkpoints",
          .summary = "What the backward reads of a checkpoint's inside is computed again.",
          .run = [](Graph& graph) {
            return !recompute_in_backward(graph, find_kept_values(graph)).empty();
          }};
}

}  // namespace ortrain
