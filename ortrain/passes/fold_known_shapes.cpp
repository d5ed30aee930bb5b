// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/fold_known_shapes.h"

namespace ortrain {
namespace {

TensorData known_tensor(const Value& value) {
  const Dims dims = to_dims(value.shape);
  const std::vector<int64_t> contents = to_dims(*value.known);
  if (value.dtype == DType::i64) return TensorData::from_values(value.dtype, dims, contents);
  return TensorData::from_values(value.dtype, dims,
                                 std::vector<int32_t>(contents.begin(), contents.end()));
}

bool run(Graph& graph) {
  bool changed = false;
  const std::vector<NodeId> order = graph.order();
  for (NodeId id : order) {
    for (ValueId output : std::vector<ValueId>(graph.node(id).outputs)) {
      if (output == kNoValue) continue;
      const Value& value = graph.value(output);
      if (!value.known || !is_constant(*value.known) || !is_constant(value.shape)) continue;
      if (value.dtype != DType::i64 && value.dtype != DType::i32) continue;
      graph.replace_uses(output, graph.add_constant(known_tensor(value)));
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
