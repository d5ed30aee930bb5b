// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/fold_known_shapes.h"

#include <utility>

namespace ortrain {
namespace {

bool run(Graph& graph) {
  bool changed = false;
  const std::vector<NodeId> order = graph.order();
  for (NodeId id : order) {
    for (ValueId output : std::vector<ValueId>(graph.node(id).outputs)) {
      if (output == kNoValue) continue;
      const Value& value = graph.value(output);
      if (!value.known || !is_constant(*value.known) || !is_constant(value.shape)) continue;
      TensorData known =
          TensorData::from_ints(value.dtype, to_dims(value.shape), to_dims(*value.known));
      graph.replace_uses(output, graph.add_constant(std::move(known)));
      changed = true;
    }
  }
  return changed;
}

}  // namespace

Pass fold_known_shapes() {
  return {.name = "fold_known_shapes",
          .summary = "Shape arithmetic with a known result becomes a constant.",
          .run = run};
}

}  // namespace ortrain
