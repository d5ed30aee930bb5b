// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/fusion_forecast.h"

#include <algorithm>
#include <optional>

#include "ortrain/ir/op_registry.h"

namespace ortrain {
namespace {

// As in fuse_elementwise.cpp.
constexpr size_t kMaxMembers = 64;

}  // namespace

FusionForecast::FusionForecast(const Graph& graph) : graph_(graph), clusters_(graph) {
  // Constants, and what is computed from them alone, which is in no group.
  std::vector<bool> is_constant(graph.num_values(), false);
  for (size_t v = 0; v < is_constant.size(); ++v) {
    is_constant[v] = graph.value(static_cast<ValueId>(v)).kind == ValueKind::constant;
  }
  for (NodeId id : graph.order()) {
    const Node& node = graph.node(id);
    const bool fixed = !op_registry().get(node.domain, node.op).draws_random_numbers &&
                       std::ranges::all_of(node.inputs, [&](ValueId input) {
                         return input == kNoValue || is_constant[static_cast<size_t>(input)];
                       });
    if (fixed) {
      for (ValueId output : node.outputs) {
        if (output != kNoValue) is_constant[static_cast<size_t>(output)] = true;
      }
    } else if (const std::optional<ElementwiseGroup> group = group_of(graph, node)) {
      groups_[clusters_.of(id)] = {.common = *group};
    }
  }
  for (NodeId id : graph.order()) {
    if (is_elementwise(id)) join_producers(id);
  }
}

void FusionForecast::join_producers(NodeId id) {
  const Node& node = graph_.node(id);
  const size_t operands = row_reduction_of(node) ? 1 : node.inputs.size();
  for (size_t i = 0; i < operands; ++i) {
    const ValueId input = node.inputs[i];
    const NodeId producer = input == kNoValue ? kNoNode : graph_.value(input).producer;
    if (producer != kNoNode && is_elementwise(producer)) join(producer, id);
  }
}

bool FusionForecast::join(NodeId a, NodeId b) {
  const NodeClusters::ClusterId from = clusters_.of(a);
  const NodeClusters::ClusterId into = clusters_.of(b);
  if (from == into) return true;
  const Group& first = groups_.at(from);
  Group& second = groups_.at(into);
  const char* why = nullptr;
  const size_t size = first.size + second.size;
  const std::optional<ElementwiseGroup> joined = join_groups(first.common, second.common, why);
  if (size > kMaxMembers || !joined || !clusters_.merge(into, from)) return false;
  second = {*joined, size};
  groups_.erase(from);
  return true;
}

bool FusionForecast::admit(NodeId member, NodeId node, size_t size) {
  Group& group = groups_.at(clusters_.of(member));
  std::optional<ElementwiseGroup> added = group_of(graph_, graph_.node(node));
  if (!added || group.size + size > kMaxMembers) return false;
  added->phase = group.common.phase;
  const char* why = nullptr;
  const std::optional<ElementwiseGroup> joined = join_groups(group.common, *added, why);
  if (!joined) return false;
  group = {*joined, group.size + size};
  return true;
}

}  // namespace ortrain
