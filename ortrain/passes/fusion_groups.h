// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "ortrain/passes/elementwise_group.h"
#include "ortrain/passes/node_clusters.h"

namespace ortrain {

// Which nodes fuse_elementwise makes one node of. Passes before it ask the same, where they decide
// by what reaches memory; nodes that these add can change that: `join` and `admit` tell how.
class FusionGroups {
 public:
  using ClusterId = NodeClusters::ClusterId;

  explicit FusionGroups(const Graph& graph);

  // It can be in a group, if only its own.
  bool is_elementwise(NodeId id) const { return groups_.contains(of(id)); }
  // Equal for nodes that become one.
  ClusterId of(NodeId id) const { return clusters_.of(id); }
  const std::vector<NodeId>& members(ClusterId id) const { return clusters_.members(id); }
  // What the members of a group of elementwise nodes have in common.
  const ElementwiseGroup& common(ClusterId id) const { return groups_.at(id).common; }
  // Computed from constants alone, and in no group.
  bool is_constant(const Node& node) const;

  // Makes one group of those of two elementwise nodes; where that cannot be, says why.
  const char* join(NodeId a, NodeId b);
  // Counts a copy of `node`, in the phase of `member`, to the group of `member`; false where it
  // would not fit. `size`: members that it makes.
  bool admit(NodeId member, NodeId node, size_t size);

  // Maker and reader of a value that did not come together, and why; where somebody takes notes.
  const std::map<std::pair<NodeId, NodeId>, const char*>& refusals() const { return refusals_; }

 private:
  struct Group {
    ElementwiseGroup common;
    size_t size = 1;
  };

  void inspect(NodeId id);
  void join_producers(NodeId id);

  const Graph& graph_;
  NodeClusters clusters_;
  std::map<ClusterId, Group> groups_;
  std::vector<bool> constant_;  // by value: computed from constants alone
  std::map<std::pair<NodeId, NodeId>, const char*> refusals_;
};

}  // namespace ortrain
