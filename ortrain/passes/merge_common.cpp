// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/merge_common.h"

#include <algorithm>
#include <unordered_map>

#include "ortrain/ir/op_registry.h"

namespace ortrain {
namespace {

size_t hash_of(const Node& node) {
  size_t hash = std::hash<std::string>()(node.op);
  for (ValueId input : node.inputs) hash = hash * 1000003 + static_cast<size_t>(input);
  return hash * 31 + node.outputs.size();
}

bool is_small_integer(const Value& value) {
  return !is_float(value.dtype) && value.shape.size() <= 1 &&
         (value.shape.empty() || value.known.has_value());
}

bool same(const Graph& graph, const Node& kept, const Node& node) {
  if (kept.op != node.op || kept.domain != node.domain || kept.inputs != node.inputs ||
      kept.outputs.size() != node.outputs.size() ||
      !operator_equal(kept.attributes, node.attributes)) {
    return false;
  }
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    if (node.outputs[i] != kNoValue && kept.outputs[i] == kNoValue) return false;
  }
  if (kept.phase == node.phase) return true;
  return std::ranges::all_of(node.outputs, [&](ValueId id) {
    return id == kNoValue || is_small_integer(graph.value(id));
  });
}

bool run(Graph& graph) {
  // Uses of a dropped value are rewritten as the walk comes by: replacing one at a time would cost
  // a walk each.
  std::vector<ValueId> stands_for(graph.num_values());
  for (size_t id = 0; id < stands_for.size(); ++id) stands_for[id] = static_cast<ValueId>(id);
  std::unordered_multimap<size_t, NodeId> seen;
  bool changed = false;
  for (NodeId id : graph.order()) {
    Node& node = graph.node(id);
    for (ValueId& input : node.inputs) {
      if (input != kNoValue) input = stands_for[static_cast<size_t>(input)];
    }
    if (op_registry().get(node.domain, node.op).draws_random_numbers) continue;
    const size_t hash = hash_of(node);
    auto [begin, end] = seen.equal_range(hash);
    const auto found = std::find_if(
        begin, end, [&](const auto& entry) { return same(graph, graph.node(entry.second), node); });
    if (found == end) {
      seen.emplace(hash, id);
      continue;
    }
    const Node& kept = graph.node(found->second);
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (node.outputs[i] == kNoValue) continue;
      stands_for[static_cast<size_t>(node.outputs[i])] = kept.outputs[i];
    }
    changed = true;
  }
  for (GraphOutput& output : graph.outputs()) {
    output.value = stands_for[static_cast<size_t>(output.value)];
  }
  return changed;
}

}  // namespace

Pass merge_common() {
  return {.name = "merge_common",
          .summary = "Equal nodes are computed once.",
          .run = run};
}

}  // namespace ortrain
