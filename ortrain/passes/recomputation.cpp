// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/recomputation.h"

#include <unordered_set>

#include "ortrain/ir/op_registry.h"

namespace ortrain {
namespace {

size_t index_of(ValueId id) { return static_cast<size_t>(id); }

class Recomputation {
 public:
  Recomputation(Graph& graph, const std::vector<bool>& is_kept)
      : graph_(graph), is_kept_(is_kept), copies_(is_kept.size(), kNoValue) {}

  std::vector<NodeId> run() {
    const std::vector<NodeId> order = graph_.order();
    for (NodeId id : order) {
      if (graph_.node(id).phase != Phase::backward || reads_shapes_only(graph_.node(id))) continue;
      for (size_t i = 0; i < graph_.node(id).inputs.size(); ++i) {
        const ValueId input = graph_.node(id).inputs[i];
        if (input != kNoValue && needs_copy(input)) graph_.node(id).inputs[i] = recomputed(input);
      }
    }
    return std::move(copied_);
  }

 private:
  // The value that stands for `wanted` in the backward.
  ValueId recomputed(ValueId wanted) {
    // What is computed again may be deeper than the stack of calls: inputs come first, without
    // recursion.
    std::vector<NodeId> pending{graph_.value(wanted).producer};
    while (!pending.empty()) {
      const NodeId id = pending.back();
      const size_t before = pending.size();
      for (ValueId input : graph_.node(id).inputs) {
        if (input != kNoValue && needs_copy(input) && copies_[index_of(input)] == kNoValue) {
          pending.push_back(graph_.value(input).producer);
        }
      }
      if (pending.size() != before) continue;
      pending.pop_back();
      if (is_copied_.insert(id).second) copy(id);
    }
    return copies_[index_of(wanted)];
  }

  bool needs_copy(ValueId id) const {
    return index_of(id) < is_kept_.size() && !is_kept_[index_of(id)];
  }

  void copy(NodeId id) {
    Node node = graph_.node(id);
    node.phase = Phase::backward;
    node.checkpoint = 0;
    for (ValueId& input : node.inputs) {
      if (input != kNoValue && needs_copy(input)) input = copies_[index_of(input)];
    }
    for (ValueId& output : node.outputs) {
      if (output == kNoValue) continue;
      const Value value = graph_.value(output);
      const ValueId again = graph_.add_value(value.name + ".again", value.dtype, value.shape);
      graph_.value(again).known = value.known;
      copies_[index_of(output)] = again;
      output = again;
    }
    graph_.add_node(std::move(node));
    copied_.push_back(id);
  }

  Graph& graph_;
  const std::vector<bool>& is_kept_;
  std::vector<ValueId> copies_;
  std::unordered_set<NodeId> is_copied_;
  std::vector<NodeId> copied_;
};

}  // namespace

bool can_run_again(const Node& node) {
  if (node.op == "External" && node.domain == kOrtrainDomain) return false;
  const bool own = node.domain.empty() || node.domain == kOrtrainDomain;
  return own || !op_registry().get(node.domain, node.op).draws_random_numbers;
}

bool reads_shapes_only(const Node& node) {
  return node.domain.empty() && (node.op == "Shape" || node.op == "Size");
}

std::vector<NodeId> recompute_in_backward(Graph& graph, const std::vector<bool>& is_kept) {
  return Recomputation(graph, is_kept).run();
}

}  // namespace ortrain
