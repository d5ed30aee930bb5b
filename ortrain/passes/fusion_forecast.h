// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <vector>

#include "ortrain/passes/elementwise_group.h"
#include "ortrain/passes/node_clusters.h"

namespace ortrain {

// Which nodes fuse_elementwise will make one node of, for passes before it that decide by what
// reaches memory. Nodes that are added can change that: `join` and `admit` tell how.
class FusionForecast {
 public:
  explicit FusionForecast(const Graph& graph);

  // It can be in a group, if only its own.
  bool is_elementwise(NodeId id) const { return groups_.contains(clusters_.of(id)); }
  // Equal for nodes that become one.
  NodeClusters::ClusterId of(NodeId id) const { return clusters_.of(id); }
  // Makes one group of those of two elementwise nodes; false where that cannot be.
  bool join(NodeId a, NodeId b);
  // Counts a copy of `node`, in the phase of `member`, to the group of `member`; false where it
  // would not fit. `size`: members that it makes.
  bool admit(NodeId member, NodeId node, size_t size);

 private:
  struct Group {
    ElementwiseGroup common;
    size_t size = 1;
  };

  void join_producers(NodeId id);

  const Graph& graph_;
  NodeClusters clusters_;
  std::map<NodeClusters::ClusterId, Group> groups_;
};

}  // namespace ortrain
