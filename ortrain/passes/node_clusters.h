// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "ortrain/ir/graph.h"

namespace ortrain {

// Groups of nodes that are to become one node each. The graph of groups stays free of cycles: a
// merge that would make one is refused. Topological order is maintained under merging (the groups
// between the two are rearranged), so that a merge costs the distance, not the graph.
class NodeClusters {
 public:
  using ClusterId = int;

  // Every node of the graph by itself.
  explicit NodeClusters(const Graph& graph);

  ClusterId of(NodeId node) const { return cluster_of_[static_cast<size_t>(node)]; }
  const std::vector<NodeId>& members(ClusterId id) const {
    return members_[static_cast<size_t>(id)];
  }
  // Joins two groups; false, and nothing changes, if a path between them leads through another.
  // `a` stands for the result.
  bool merge(ClusterId a, ClusterId b);

 private:
  static constexpr ClusterId kEmpty = -1;

  template <typename Visitor>
  bool any_predecessor(ClusterId id, Visitor visit) const;

  const Graph& graph_;
  std::vector<ClusterId> cluster_of_;         // by node slot
  std::vector<std::vector<NodeId>> members_;  // in no order
  std::vector<ClusterId> order_;              // topological, with gaps
  std::vector<size_t> position_;              // in order_
  std::vector<bool> reached_;                 // scratch of merge
};

}  // namespace ortrain
