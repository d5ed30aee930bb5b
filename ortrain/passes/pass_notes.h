// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "ortrain/ir/graph.h"

namespace ortrain {

// A node as it was when a pass looked at it; it may be gone since.
struct NotedNode {
  NodeId id = kNoNode;
  std::string op;
  std::string name;  // layer path
};

// One rewrite that a pass made, or did not.
struct PassNote {
  std::string pass;
  bool taken = false;
  // Taken: the node that stands for all of `nodes` from then on.
  NodeId result = kNoNode;
  // Taken: those that became one. Refused: the maker of a value and its reader, or one node alone.
  std::vector<NotedNode> nodes;
  std::string reason;  // refused: why, a few words
};

// Collects what passes note on this thread while it lives; the innermost one gets it. Passes ask
// `current()` first, so that nothing is made where nobody listens.
class PassNotes {
 public:
  PassNotes();
  ~PassNotes();
  PassNotes(const PassNotes&) = delete;
  PassNotes& operator=(const PassNotes&) = delete;

  // Null where nobody listens.
  static PassNotes* current();

  // What follows is of this pass.
  void begin(std::string pass) { pass_ = std::move(pass); }
  // Call it before the nodes are changed.
  void taken(const Graph& graph, NodeId result, const std::vector<NodeId>& nodes);
  void refused(const Graph& graph, std::initializer_list<NodeId> nodes, std::string reason);

  const std::vector<PassNote>& all() const { return notes_; }

 private:
  PassNotes* outer_;
  std::string pass_;
  std::vector<PassNote> notes_;
};

// For a pass that leaves a node as it is: notes why, where somebody listens. Returns false.
bool refuse(const Graph& graph, NodeId id, const char* reason);

}  // namespace ortrain
