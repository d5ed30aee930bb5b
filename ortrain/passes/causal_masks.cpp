// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/causal_masks.h"

#include <algorithm>

#include "ortrain/ir/graph_builder.h"
#include "ortrain/passes/affine_values.h"
#include "ortrain/passes/pass_notes.h"

namespace ortrain {
namespace {

constexpr size_t kMask = 3;

bool has_boolean_mask(const Graph& graph, const Node& node) {
  return node.op == "Attention" && node.domain == kOrtrainDomain && node.inputs.size() > kMask &&
         node.inputs[kMask] != kNoValue && graph.value(node.inputs[kMask]).dtype == DType::boolean;
}

// Rows of q or k: [batch, rows, columns of all heads] or [batch, heads, rows, columns].
const Dim& rows_of(const Graph& graph, ValueId id) {
  const Shape& shape = graph.value(id).shape;
  return shape[shape.size() - 2];
}

// Key j is seen by query i where j <= i: the last two coordinates of a mask.
bool is_causal(const Condition& condition) {
  if (!condition.at_least_zero) return false;
  const AffineForm& form = *condition.at_least_zero;
  const size_t rank = form.slopes.size();
  if (rank < 2 || !form.constant.is(0)) return false;
  for (size_t k = 0; k < rank; ++k) {
    const int64_t wanted = k + 2 == rank ? 1 : k + 1 == rank ? -1 : 0;
    if (form.slopes[k] != wanted) return false;
  }
  return true;
}

bool rewrite(Graph& graph, NodeId id, const AffineValues& values) {
  const Node& node = graph.node(id);
  if (!has_boolean_mask(graph, node)) return false;
  const ValueId mask = node.inputs[kMask];
  const Predicate* predicate = values.predicate(mask);
  if (predicate == nullptr || predicate->never) return false;
  const Shape& shape = graph.value(mask).shape;
  const size_t rank = shape.size();
  // Coordinates of a mask that is repeated are not those of the scores.
  const bool has_both = rank >= 2 && shape[rank - 2] == rows_of(graph, node.inputs[0]) &&
                        shape[rank - 1] == rows_of(graph, node.inputs[1]);
  bool causal = false;
  std::vector<ValueId> others;
  for (const Condition& condition : predicate->conditions) {
    if (has_both && is_causal(condition)) {
      causal = true;
      continue;
    }
    if (condition.source == kNoValue) {
      return refuse(graph, id, "a part of the mask is no value of the graph");
    }
    if (std::ranges::find(others, condition.source) == others.end()) {
      others.push_back(condition.source);
    }
  }
  // One value that is broadcast says less often what the mask says of each query and key.
  const bool is_broadcast = others.size() == 1 && others[0] != mask;
  if (!causal && !others.empty() && !is_broadcast) {
    return refuse(graph, id, "nothing in the mask is found to be causal or to hide nothing");
  }
  GraphBuilder builder(graph);
  builder.set_phase(node.phase);
  builder.set_layer(node.name);
  builder.set_checkpoint(node.checkpoint);
  ValueId rest = kNoValue;
  for (ValueId other : others) rest = rest == kNoValue ? other : builder.op("And", {rest, other});
  if (PassNotes* notes = PassNotes::current()) notes->taken(graph, id, {id});
  Node& changed = graph.node(id);  // the builder may have moved it
  changed.inputs[kMask] = rest;
  while (!changed.inputs.empty() && changed.inputs.back() == kNoValue) changed.inputs.pop_back();
  if (causal) changed.attributes["is_causal"] = int64_t{1};
  return true;
}

bool run(Graph& graph) {
  const std::vector<NodeId> order = graph.order();
  const auto has_mask = [&](NodeId id) { return has_boolean_mask(graph, graph.node(id)); };
  if (std::ranges::none_of(order, has_mask)) return false;
  const AffineValues values(graph);
  bool changed = false;
  for (NodeId id : order) changed |= rewrite(graph, id, values);
  return changed;
}

}  // namespace

Pass causal_masks() {
  return {.name = "causal_masks",
          .summary =
              "Masks that hide the keys behind each query become attention's own; parts that hide "
              "nothing are left out.",
          .run = run};
}

}  // namespace ortrain
