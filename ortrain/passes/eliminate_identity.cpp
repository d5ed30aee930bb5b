// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/eliminate_identity.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "ortrain/ir/use_index.h"

namespace ortrain {
namespace {

// Same shape out as in means same bytes out as in.
bool keeps_elements_in_order(const Node& node) {
  static const std::set<std::string_view> kStandard{
      "Reshape", "Expand", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Tile", "Concat", "Sum"};
  if (node.domain.empty()) return kStandard.contains(node.op);
  return node.op == "SumToShape";
}

bool is_identity(const Graph& graph, const Node& node) {
  if (node.inputs.empty() || node.inputs[0] == kNoValue || node.outputs.size() != 1) return false;
  const Value& input = graph.value(node.inputs[0]);
  const Value& output = graph.value(node.outputs[0]);
  if (node.domain.empty() && node.op == "Cast") return input.dtype == output.dtype;
  if (node.domain.empty() && node.op == "Transpose") {
    auto perm = node.attributes.find("perm");
    if (perm == node.attributes.end()) return input.shape.size() < 2;
    return std::ranges::is_sorted(std::get<std::vector<int64_t>>(perm->second));
  }
  if (!keeps_elements_in_order(node)) return false;
  if ((node.op == "Concat" || node.op == "Sum") && node.inputs.size() != 1) return false;
  return input.shape == output.shape && input.dtype == output.dtype;
}

const Node* producer_of(const Graph& graph, ValueId value, std::string_view op) {
  const NodeId id = graph.value(value).producer;
  if (id == kNoNode) return nullptr;
  const Node& node = graph.node(id);
  return node.domain.empty() && node.op == op ? &node : nullptr;
}

// Joins a node with the one of the same kind before it.
bool join_pair(Graph& graph, Node& node) {
  if (!node.domain.empty() || node.inputs.empty()) return false;
  if (node.op == "Transpose") {
    const Node* before = producer_of(graph, node.inputs[0], "Transpose");
    if (before == nullptr || !before->attributes.contains("perm") ||
        !node.attributes.contains("perm")) {
      return false;
    }
    const auto& first = std::get<std::vector<int64_t>>(before->attributes.at("perm"));
    const auto& second = std::get<std::vector<int64_t>>(node.attributes.at("perm"));
    std::vector<int64_t> joined;
    for (int64_t axis : second) joined.push_back(first[static_cast<size_t>(axis)]);
    node.inputs[0] = before->inputs[0];
    node.attributes["perm"] = std::move(joined);
    return true;
  }
  // The later target decides alone, unless it copies extents from its input (a 0, or a -1 among
  // symbols is still right: the number of elements is the same).
  if (node.op == "Reshape") {
    const Node* before = producer_of(graph, node.inputs[0], "Reshape");
    if (before == nullptr) return false;
    const auto allow_zero = node.attributes.find("allowzero");
    const bool zero_means_copy =
        allow_zero == node.attributes.end() || std::get<int64_t>(allow_zero->second) == 0;
    const Shape& middle = graph.value(node.inputs[0]).shape;
    const Shape& source = graph.value(before->inputs[0]).shape;
    if (zero_means_copy) {
      const std::optional<std::vector<Dim>>& target = graph.value(node.inputs[1]).known;
      if (!target) return false;
      for (size_t i = 0; i < target->size(); ++i) {
        if ((*target)[i].is_constant() && !(*target)[i].is(0)) continue;
        // A copied extent, or a symbol that may turn out to be 0: equal in both, or no joining.
        if (i >= source.size() || i >= middle.size() || !(source[i] == middle[i])) return false;
      }
    }
    node.inputs[0] = before->inputs[0];
    return true;
  }
  return false;
}

bool run(Graph& graph) {
  bool changed = false;
  UseIndex index(graph);
  const std::vector<NodeId> order = graph.order();
  for (NodeId id : order) {
    while (join_pair(graph, graph.node(id))) {
      index.note_reads(id);
      changed = true;
    }
    const Node& node = graph.node(id);
    if (!is_identity(graph, node)) continue;
    index.replace_uses(node.outputs[0], node.inputs[0]);
    changed = true;
  }
  return changed;
}

bool run_stop_gradient(Graph& graph) {
  bool changed = false;
  UseIndex index(graph);
  const std::vector<NodeId> order = graph.order();
  for (NodeId id : order) {
    const Node& node = graph.node(id);
    if (node.op != "StopGradient" || node.domain != kOrtrainDomain) continue;
    index.replace_uses(node.outputs[0], node.inputs[0]);
    changed = true;
  }
  return changed;
}

}  // namespace

Pass eliminate_identity() {
  return {.name = "eliminate_identity",
          .summary = "Nodes that give back their input, and pairs that join, go away.",
          .run = run};
}

Pass eliminate_stop_gradient() {
  return {.name = "eliminate_stop_gradient",
          .summary = "StopGradient goes away once gradients are built.",
          .run = run_stop_gradient};
}

}  // namespace ortrain
