// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/recompute_checkpoints.h"

#include <unordered_set>
#include <vector>

#include "ortrain/ir/op_registry.h"

namespace ortrain {
namespace {

size_t index_of(ValueId id) { return static_cast<size_t>(id); }

// Operators of the engine's own give the same numbers again: their random ones come from the seed
// and a stream. Nobody knows about others.
bool gives_the_same_again(const Node& node) {
  if (node.op == "External" && node.domain == kOrtrainDomain) return false;
  const bool own = node.domain.empty() || node.domain == kOrtrainDomain;
  return own || !op_registry().get(node.domain, node.op).draws_random_numbers;
}

// Their input need not be there.
bool reads_shapes_only(const Node& node) {
  return node.domain.empty() && (node.op == "Shape" || node.op == "Size");
}

class Recomputation {
 public:
  explicit Recomputation(Graph& graph)
      : graph_(graph), is_kept_(graph.num_values(), false), copies_(graph.num_values(), kNoValue) {}

  bool run() {
    find_kept_values();
    const std::vector<NodeId> order = graph_.order();
    bool changed = false;
    for (NodeId id : order) {
      if (graph_.node(id).phase != Phase::backward || reads_shapes_only(graph_.node(id))) continue;
      for (size_t i = 0; i < graph_.node(id).inputs.size(); ++i) {
        const ValueId input = graph_.node(id).inputs[i];
        if (input == kNoValue) continue;
        const ValueId again = recomputed(input);
        if (again == input) continue;
        graph_.node(id).inputs[i] = again;
        changed = true;
      }
    }
    return changed;
  }

 private:
  // Those that live until the backward anyway: graph inputs, constants, and what another checkpoint
  // or none at all reads, in the forward.
  void find_kept_values() {
    for (size_t i = 0; i < is_kept_.size(); ++i) {
      const Value& value = graph_.value(static_cast<ValueId>(i));
      is_kept_[i] = value.producer == kNoNode || !can_recompute(graph_.node(value.producer));
    }
    for (NodeId id : graph_.order()) {
      const Node& node = graph_.node(id);
      if (node.phase != Phase::forward) continue;
      for (ValueId input : node.inputs) {
        if (input == kNoValue || is_kept_[index_of(input)]) continue;
        const Node& producer = graph_.node(graph_.value(input).producer);
        if (producer.checkpoint != node.checkpoint) is_kept_[index_of(input)] = true;
      }
    }
    for (const GraphOutput& output : graph_.outputs()) is_kept_[index_of(output.value)] = true;
  }

  static bool can_recompute(const Node& node) {
    return node.phase == Phase::forward && node.checkpoint != 0 && gives_the_same_again(node);
  }

  // The value that stands for `wanted` in the backward.
  ValueId recomputed(ValueId wanted) {
    if (!needs_copy(wanted)) return wanted;
    // A checkpoint may be deeper than the stack of calls: inputs come first, without recursion.
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
  }

  Graph& graph_;
  std::vector<bool> is_kept_;
  std::vector<ValueId> copies_;
  std::unordered_set<NodeId> is_copied_;
};

}  // namespace

Pass recompute_checkpoints() {
  return {.name = "recompute_checkpoints",
          .summary = "What the backward reads of a checkpoint's inside is computed again.",
          .run = [](Graph& graph) { return Recomputation(graph).run(); }};
}

}  // namespace ortrain
