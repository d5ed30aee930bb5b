// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/move_casts.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "ortrain/ir/graph_builder.h"
#include "ortrain/ir/use_index.h"

namespace ortrain {
namespace {

bool is_cast(const Node& node) { return node.op == "Cast" && node.domain.empty(); }

// Every value of `from` is one of `to`.
bool loses_nothing(DType from, DType to) {
  if (!is_float(from) || !is_float(to)) return false;
  return from == to || to == DType::f64 || (to == DType::f32 && from != DType::f64);
}

class CastMover {
 public:
  explicit CastMover(Graph& graph) : graph_(graph), builder_(graph), index_(graph) {
    const auto users = graph.users();
    for (const auto& list : users) uses_.push_back(list.size());
    for (const GraphOutput& output : graph.outputs()) ++uses_[index_of(output.value)];
  }

  bool run() {
    const std::vector<NodeId> order = graph_.order();
    for (NodeId id : order) changed_ |= join(id);
    // With the flow, so that a cast passes several; then against it.
    for (NodeId id : order) changed_ |= widen_later(id);
    for (auto id = order.rbegin(); id != order.rend(); ++id) changed_ |= narrow_earlier(*id);
    return changed_;
  }

 private:
  static size_t index_of(ValueId id) { return static_cast<size_t>(id); }

  const Node* producer(ValueId id) const {
    const NodeId node = graph_.value(id).producer;
    return node == kNoNode ? nullptr : &graph_.node(node);
  }

  bool join(NodeId id) {
    Node& node = graph_.node(id);
    if (!is_cast(node)) return false;
    const Node* before = producer(node.inputs[0]);
    if (before == nullptr || !is_cast(*before)) return false;
    const ValueId source = before->inputs[0];
    const DType from = graph_.value(source).dtype;
    if (!loses_nothing(from, graph_.value(node.inputs[0]).dtype)) return false;
    if (from == graph_.value(node.outputs[0]).dtype) {
      replace(node.outputs[0], source);
    } else {
      --uses_[index_of(node.inputs[0])];
      node.inputs[0] = source;
      index_.note_reads(id);
      ++uses_[index_of(source)];
    }
    return true;
  }

  bool between(const Node& first, const Node& second) const {
    return uses_[index_of(first.outputs[0])] == 1 && first.phase == second.phase &&
           first.checkpoint == second.checkpoint;
  }

  void build_like(const Node& node) {
    builder_.set_phase(node.phase);
    builder_.set_layer(node.name);
    builder_.set_checkpoint(node.checkpoint);
  }

  // The node with another input 0.
  ValueId moved(const Node& node, ValueId input) {
    std::vector<ValueId> inputs = node.inputs;
    inputs[0] = input;
    return count(
        builder_.node(node.domain, node.op, std::move(inputs), node.attributes, {true})[0]);
  }

  ValueId count(ValueId made) {
    uses_.resize(graph_.num_values(), 1);
    return made;
  }

  void replace(ValueId from, ValueId to) {
    index_.replace_uses(from, to);
    uses_[index_of(to)] += uses_[index_of(from)];
    uses_[index_of(from)] = 0;
  }

  bool widen_later(NodeId id) {
    const Node& move = graph_.node(id);
    if (!only_moves(move) || uses_[index_of(move.outputs[0])] == 0) return false;
    const Node* cast = producer(move.inputs[0]);
    if (cast == nullptr || !is_cast(*cast) || !between(*cast, move)) return false;
    const ValueId source = cast->inputs[0];
    const DType from = graph_.value(source).dtype, to = graph_.value(move.outputs[0]).dtype;
    if (from == to || !loses_nothing(from, to)) return false;
    build_like(move);
    const ValueId narrow = moved(move, source);
    const ValueId wide = count(builder_.cast(narrow, to));
    const size_t uses = uses_[index_of(move.outputs[0])];
    replace(move.outputs[0], wide);
    uses_[index_of(wide)] = uses;
    return true;
  }

  bool narrow_earlier(NodeId id) {
    const Node& cast = graph_.node(id);
    if (!is_cast(cast) || uses_[index_of(cast.outputs[0])] == 0) return false;
    const DType to = graph_.value(cast.outputs[0]).dtype;
    if (!is_float(to) || !is_float(graph_.value(cast.inputs[0]).dtype) ||
        size_of(to) >= size_of(graph_.value(cast.inputs[0]).dtype)) {
      return false;
    }
    // All that it passes at once.
    std::vector<const Node*> moves;
    const Node* after = &cast;
    for (const Node* move = producer(cast.inputs[0]);
         move != nullptr && only_moves(*move) && between(*move, *after);
         move = producer(move->inputs[0])) {
      moves.push_back(move);
      after = move;
    }
    if (moves.empty()) return false;
    build_like(cast);
    ValueId value = count(builder_.cast(moves.back()->inputs[0], to));
    for (auto move = moves.rbegin(); move != moves.rend(); ++move) {
      build_like(**move);
      value = moved(**move, value);
    }
    const size_t uses = uses_[index_of(cast.outputs[0])];
    replace(cast.outputs[0], value);
    uses_[index_of(value)] = uses;
    return true;
  }

  Graph& graph_;
  GraphBuilder builder_;
  UseIndex index_;
  std::vector<size_t> uses_;  // by value: nodes and outputs that read it
  bool changed_ = false;
};

}  // namespace

bool only_moves(const Node& node) {
  static constexpr std::array<std::string_view, 5> kOps{"Flatten", "Reshape", "Squeeze",
                                                        "Transpose", "Unsqueeze"};
  return node.domain.empty() && std::ranges::find(kOps, node.op) != kOps.end();
}

Pass move_casts() {
  return {.name = "move_casts",
          .summary = "Casts behind lossless ones go away, others go to where fewer bytes move.",
          .run = [](Graph& graph) { return CastMover(graph).run(); }};
}

}  // namespace ortrain
