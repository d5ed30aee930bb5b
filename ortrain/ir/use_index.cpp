// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/use_index.h"

#include <algorithm>
#include <iterator>

#include "ortrain/base/error.h"

namespace ortrain {

void UseIndex::note_reads(NodeId node) {
  readers_.resize(std::max(readers_.size(), graph_.num_values()));
  for (ValueId input : graph_.node(node).inputs) {
    if (input == kNoValue) continue;
    std::vector<NodeId>& readers = readers_[static_cast<size_t>(input)];
    if (readers.empty() || readers.back() != node) readers.push_back(node);
  }
}

void UseIndex::follow_new_nodes() {
  for (; known_nodes_ < graph_.num_node_slots(); ++known_nodes_) {
    const auto id = static_cast<NodeId>(known_nodes_);
    if (graph_.alive(id)) note_reads(id);
  }
  readers_.resize(std::max(readers_.size(), graph_.num_values()));
}

void UseIndex::replace_uses(ValueId from, ValueId to) {
  check(from != kNoValue, "what is absent has no uses");
  follow_new_nodes();
  std::vector<NodeId> readers;
  if (to != from) readers.swap(readers_[static_cast<size_t>(from)]);
  std::erase_if(readers, [&](NodeId id) {
    if (!graph_.alive(id)) return true;
    bool reads = false;
    for (ValueId& input : graph_.node(id).inputs) {
      if (input != from) continue;
      input = to;
      reads = true;
    }
    return !reads;
  });
  if (to != kNoValue) {
    std::vector<NodeId>& into = readers_[static_cast<size_t>(to)];
    into.insert(into.end(), readers.begin(), readers.end());
  }
  for (GraphOutput& output : graph_.outputs()) {
    if (output.value == from) output.value = to;
  }
}

}  // namespace ortrain
