// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/full_losses.h"

#include "ortrain/ir/graph_builder.h"
#include "ortrain/passes/move_casts.h"
#include "ortrain/passes/pass_notes.h"

namespace ortrain {
namespace {

constexpr size_t kWeight = 2;

bool is_half(DType type) { return type == DType::f16 || type == DType::bf16; }

class Rewrite {
 public:
  explicit Rewrite(Graph& graph) : graph_(graph), users_(graph.users()) {
    outputs_.assign(graph.num_values(), false);
    for (const GraphOutput& output : graph.outputs()) {
      outputs_[static_cast<size_t>(output.value)] = true;
    }
  }

  bool run() {
    bool changed = false;
    const std::vector<NodeId> order = graph_.order();
    for (NodeId id : order) {
      const Node& node = graph_.node(id);
      if (node.op == "CrossEntropy" && node.domain == kOrtrainDomain) changed |= rewrite(id);
    }
    return changed;
  }

 private:
  bool rewrite(NodeId id) {
    const Node loss = graph_.node(id);
    if (graph_.value(loss.inputs[0]).dtype != DType::f32) return false;
    if (loss.inputs.size() > kWeight && loss.inputs[kWeight] != kNoValue) {
      return refuse(graph_, id, "the classes have weights in float");
    }
    // From the logits up to the cast.
    std::vector<NodeId> between;
    ValueId at = loss.inputs[0];
    while (true) {
      if (static_cast<size_t>(at) >= users_.size()) return false;  // made by this pass
      // Another reader adds a gradient in float, which is rounded with this one.
      if (outputs_[static_cast<size_t>(at)] || users_[static_cast<size_t>(at)].size() != 1) {
        return refuse(graph_, id, "the logits in float are read by others, too");
      }
      const NodeId producer = graph_.value(at).producer;
      if (producer == kNoNode) return false;
      const Node& node = graph_.node(producer);
      if (!node.domain.empty()) return false;
      if (node.op == "Cast") break;
      if (!only_moves(node) && node.op != "Slice") return false;
      between.push_back(producer);
      at = node.inputs[0];
    }
    ValueId logits = graph_.node(graph_.value(at).producer).inputs[0];
    if (!is_half(graph_.value(logits).dtype)) return false;

    GraphBuilder builder(graph_);
    for (auto each = between.rbegin(); each != between.rend(); ++each) {
      const Node node = graph_.node(*each);
      std::vector<ValueId> inputs = node.inputs;
      inputs[0] = logits;
      place(builder, node);
      logits = builder.node(node.domain, node.op, std::move(inputs), node.attributes, {true})[0];
    }
    std::vector<ValueId> inputs = loss.inputs;
    inputs[0] = logits;
    Attributes attributes = loss.attributes;
    attributes["full_loss"] = int64_t{1};
    const bool keeps_sums = loss.outputs.size() > 1 && loss.outputs[1] != kNoValue;
    place(builder, loss);
    const std::vector<ValueId> made =
        builder.node(kOrtrainDomain, "CrossEntropy", std::move(inputs), std::move(attributes),
                     {loss.outputs[0] != kNoValue, keeps_sums});
    if (PassNotes* notes = PassNotes::current()) {
      const ValueId result = made[0] != kNoValue ? made[0] : made[1];
      notes->taken(graph_, graph_.value(result).producer, {graph_.value(at).producer, id});
    }
    for (size_t k = 0; k < made.size(); ++k) {
      if (made[k] != kNoValue) graph_.replace_uses(loss.outputs[k], made[k]);
    }
    return true;
  }

  static void place(GraphBuilder& builder, const Node& node) {
    builder.set_phase(node.phase);
    builder.set_layer(node.name);
    builder.set_checkpoint(node.checkpoint);
  }

  Graph& graph_;
  const std::vector<std::vector<NodeId>> users_;
  std::vector<bool> outputs_;
};

}  // namespace

Pass full_losses() {
  return {.name = "full_losses",
          .summary = "Cross entropy reads 16-bit logits as they are, its loss stays a float.",
          .run = [](Graph& graph) { return Rewrite(graph).run(); }};
}

}  // namespace ortrain
