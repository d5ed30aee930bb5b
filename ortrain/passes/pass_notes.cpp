// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/pass_notes.h"

#include <utility>

namespace ortrain {
namespace {

thread_local PassNotes* innermost = nullptr;

NotedNode noted(const Graph& graph, NodeId id) {
  const Node& node = graph.node(id);
  return {id, node.op, node.name};
}

}  // namespace

PassNotes::PassNotes() : outer_(std::exchange(innermost, this)) {}

PassNotes::~PassNotes() { innermost = outer_; }

PassNotes* PassNotes::current() { return innermost; }

void PassNotes::taken(const Graph& graph, NodeId result, const std::vector<NodeId>& nodes) {
  PassNote note{.pass = pass_, .taken = true, .result = result};
  for (NodeId id : nodes) note.nodes.push_back(noted(graph, id));
  notes_.push_back(std::move(note));
}

void PassNotes::refused(const Graph& graph, std::initializer_list<NodeId> nodes,
                        std::string reason) {
  PassNote note{.pass = pass_, .reason = std::move(reason)};
  for (NodeId id : nodes) note.nodes.push_back(noted(graph, id));
  notes_.push_back(std::move(note));
}

bool refuse(const Graph& graph, NodeId id, const char* reason) {
  if (PassNotes* notes = PassNotes::current()) notes->refused(graph, {id}, reason);
  return false;
}

}  // namespace ortrain
