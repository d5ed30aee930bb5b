// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/fusion_groups.h"

#include <algorithm>
#include <optional>

#include "ortrain/ir/op_registry.h"
#include "ortrain/passes/pass_notes.h"

namespace ortrain {
namespace {

// Bounds the registers that are alive at a time.
constexpr size_t kMaxMembers = 64;

}  // namespace

FusionGroups::FusionGroups(const Graph& graph) : graph_(graph), clusters_(graph) {
  constant_.assign(graph.num_values(), false);
  for (NodeId id : graph.order()) inspect(id);
  for (NodeId id : graph.order()) join_producers(id);
}

// Finds out whether a node may be in a group, and what group it makes by itself.
void FusionGroups::inspect(NodeId id) {
  const Node& node = graph_.node(id);
  if (is_constant(node)) {
    for (ValueId output : node.outputs) {
      if (output != kNoValue) constant_[static_cast<size_t>(output)] = true;
    }
    return;
  }
  if (const std::optional<ElementwiseGroup> group = group_of(graph_, node)) {
    groups_[of(id)] = {.common = *group};
  }
}

bool FusionGroups::is_constant(const Node& node) const {
  if (op_registry().get(node.domain, node.op).draws_random_numbers) return false;
  return std::ranges::all_of(node.inputs, [&](ValueId input) {
    return input == kNoValue || graph_.value(input).kind == ValueKind::constant ||
           constant_[static_cast<size_t>(input)];
  });
}

void FusionGroups::join_producers(NodeId id) {
  if (!is_elementwise(id)) return;
  const Node& node = graph_.node(id);
  const size_t operands = row_reduction_of(node) ? 1 : node.inputs.size();
  for (size_t i = 0; i < operands; ++i) {
    const ValueId input = node.inputs[i];
    const NodeId producer = input == kNoValue ? kNoNode : graph_.value(input).producer;
    if (producer == kNoNode || !is_elementwise(producer)) continue;
    const char* const why = join(producer, id);
    if (why != nullptr && PassNotes::current() != nullptr) refusals_[{producer, id}] = why;
  }
}

const char* FusionGroups::join(NodeId a, NodeId b) {
  const ClusterId from = of(a), into = of(b);
  if (from == into) return nullptr;
  const Group& first = groups_.at(from);
  Group& second = groups_.at(into);
  const size_t size = first.size + second.size;
  if (size > kMaxMembers) return "the group would have more than 64 members";
  const char* why = nullptr;
  const std::optional<ElementwiseGroup> joined = join_groups(first.common, second.common, why);
  if (!joined) return why;
  if (!clusters_.merge(into, from)) return "a path between them leads through another node";
  second = {*joined, size};
  groups_.erase(from);
  return nullptr;
}

bool FusionGroups::admit(NodeId member, NodeId node, size_t size) {
  Group& group = groups_.at(of(member));
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
