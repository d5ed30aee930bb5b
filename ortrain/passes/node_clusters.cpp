// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/node_clusters.h"

#include <algorithm>

namespace ortrain {

NodeClusters::NodeClusters(const Graph& graph)
    : graph_(graph), cluster_of_(graph.num_node_slots(), kEmpty) {
  for (NodeId node : graph.order()) {
    const ClusterId id = static_cast<ClusterId>(members_.size());
    cluster_of_[static_cast<size_t>(node)] = id;
    members_.push_back({node});
    order_.push_back(id);
    position_.push_back(order_.size() - 1);
  }
  reached_.assign(members_.size(), false);
}

template <typename Visitor>
bool NodeClusters::any_predecessor(ClusterId id, Visitor visit) const {
  for (NodeId node : members(id)) {
    for (ValueId input : graph_.node(node).inputs) {
      if (input == kNoValue) continue;
      const NodeId producer = graph_.value(input).producer;
      if (producer == kNoNode || of(producer) == id) continue;
      if (visit(of(producer))) return true;
    }
  }
  return false;
}

bool NodeClusters::merge(ClusterId a, ClusterId b) {
  if (a == b) return true;
  const bool a_first = position_[static_cast<size_t>(a)] < position_[static_cast<size_t>(b)];
  const ClusterId early = a_first ? a : b;
  const ClusterId late = a_first ? b : a;
  const size_t begin = position_[static_cast<size_t>(early)];
  const size_t end = position_[static_cast<size_t>(late)];

  // What depends on the early group goes behind the result, the rest stays in front.
  std::vector<ClusterId> before;
  std::vector<ClusterId> behind;
  for (size_t i = begin + 1; i < end; ++i) {
    const ClusterId id = order_[i];
    if (id == kEmpty) continue;
    const bool depends = any_predecessor(id, [&](ClusterId other) {
      return other == early || reached_[static_cast<size_t>(other)];
    });
    if (depends) reached_[static_cast<size_t>(id)] = true;
    (depends ? behind : before).push_back(id);
  }
  const bool cycle =
      any_predecessor(late, [&](ClusterId other) { return reached_[static_cast<size_t>(other)]; });
  for (ClusterId id : behind) reached_[static_cast<size_t>(id)] = false;
  if (cycle) return false;

  std::fill(order_.begin() + static_cast<std::ptrdiff_t>(begin),
            order_.begin() + static_cast<std::ptrdiff_t>(end) + 1, kEmpty);
  size_t at = begin;
  const auto place = [&](ClusterId id) {
    order_[at] = id;
    position_[static_cast<size_t>(id)] = at++;
  };
  for (ClusterId id : before) place(id);
  place(a);
  for (ClusterId id : behind) place(id);

  std::vector<NodeId>& source = members_[static_cast<size_t>(b)];
  for (NodeId node : source) cluster_of_[static_cast<size_t>(node)] = a;
  std::vector<NodeId>& target = members_[static_cast<size_t>(a)];
  target.insert(target.end(), source.begin(), source.end());
  source.clear();
  return true;
}

}  // namespace ortrain
