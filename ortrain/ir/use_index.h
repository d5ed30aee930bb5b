// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "ortrain/ir/graph.h"

namespace ortrain {

// Which nodes read which values of a graph, so that what replaces many values one after the other
// does not walk all nodes for each (Graph::replace_uses does). It follows nodes that are added; of
// others that come to read another value it has to be told.
class UseIndex {
 public:
  explicit UseIndex(Graph& graph) : graph_(graph) {}

  // `node` has come to read values that it did not read before.
  void note_reads(NodeId node);
  // As Graph::replace_uses.
  void replace_uses(ValueId from, ValueId to);

 private:
  void follow_new_nodes();

  Graph& graph_;
  size_t known_nodes_ = 0;
  // By value: some may have stopped to read it.
  std::vector<std::vector<NodeId>> readers_;
};

}  // namespace ortrain
