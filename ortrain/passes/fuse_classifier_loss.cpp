// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/fuse_classifier_loss.h"

#include <algorithm>
#include <set>

#include "ortrain/ir/attribute_reader.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/passes/pass_notes.h"

namespace ortrain {
namespace {

class Fusion {
 public:
  explicit Fusion(Graph& graph) : graph_(graph), users_(graph.users()) {
    for (const GraphOutput& output : graph.outputs()) visible_.insert(output.value);
  }

  bool run() {
    bool changed = false;
    const std::vector<NodeId> order = graph_.order();
    for (NodeId id : order) {
      const Node& node = graph_.node(id);
      if (node.op == "CrossEntropyGrad" && node.domain == kOrtrainDomain) {
        changed = fuse(id) || changed;
      }
    }
    return changed;
  }

 private:
  struct Readers {
    NodeId input_grad = kNoNode;
    NodeId weight_grad = kNoNode;
    NodeId bias_grad = kNoNode;
  };

  bool fuse(NodeId id) {
    const Node loss = graph_.node(id);
    if (graph_.value(loss.inputs[1]).shape.size() != 2) {
      return refuse(graph_, id, "the logits have more dimensions than rows and classes");
    }
    if (loss.inputs.size() < 4 || loss.inputs[3] == kNoValue) {
      return refuse(graph_, id, "the forward kept no sums of exponentials");
    }
    if (loss.inputs.size() > 4 && loss.inputs[4] != kNoValue) {
      return refuse(graph_, id, "the classes have weights");
    }
    Readers found;
    if (!find_readers(loss.outputs[0], found)) {
      return refuse(graph_, id,
                    "the gradient of the logits is read by others than one linear layer");
    }
    if (found.input_grad == kNoNode || found.weight_grad == kNoNode) {
      return refuse(graph_, id, "the linear layer's input or weight has no gradient");
    }
    const Node input_grad = graph_.node(found.input_grad);
    const Node weight_grad = graph_.node(found.weight_grad);
    const ValueId x = weight_grad.inputs[1];
    if (!(graph_.value(x).shape == graph_.value(input_grad.outputs[0]).shape)) {
      return refuse(graph_, id, "the linear layer's input was reshaped in between");
    }

    GraphBuilder builder(graph_);
    builder.set_phase(loss.phase);
    builder.set_layer(input_grad.name);
    std::vector<ValueId> inputs{
        loss.inputs[0], loss.inputs[1], loss.inputs[2], loss.inputs[3], x, input_grad.inputs[1]};
    if (weight_grad.inputs.size() > 2) inputs.push_back(weight_grad.inputs[2]);
    const bool has_bias = found.bias_grad != kNoNode;
    const std::vector<ValueId> made =
        builder.node(kOrtrainDomain, "ClassifierLossGrad", std::move(inputs), loss.attributes,
                     {true, true, has_bias});
    if (PassNotes* notes = PassNotes::current()) {
      std::vector<NodeId> parts{id, found.input_grad, found.weight_grad};
      if (has_bias) parts.push_back(found.bias_grad);
      notes->taken(graph_, graph_.value(made[0]).producer, parts);
    }
    graph_.replace_uses(input_grad.outputs[0], made[0]);
    graph_.replace_uses(weight_grad.outputs[0], made[1]);
    if (has_bias) graph_.replace_uses(graph_.node(found.bias_grad).outputs[0], made[2]);
    return true;
  }

  // Whether nobody but the three products, one of each, reads the gradient of the logits, as it is
  // or with the rows in more dimensions.
  bool find_readers(ValueId dlogits, Readers& found) const {
    std::vector<ValueId> open{dlogits};  // a file may hold any number of reshapes in a row
    while (!open.empty()) {
      const ValueId read = open.back();
      open.pop_back();
      if (visible_.count(read) != 0) return false;
      const Shape& shape = graph_.value(read).shape;
      for (NodeId user : users_[static_cast<size_t>(read)]) {
        const Node& node = graph_.node(user);
        if (keeps_columns(node, read)) {
          open.push_back(node.outputs[0]);
          continue;
        }
        NodeId* place = nullptr;
        if (node.op == "LinearInputGrad" && node.inputs[0] == read && node.inputs.size() == 2) {
          place = &found.input_grad;
        } else if (node.op == "LinearWeightGrad" && node.inputs[0] == read &&
                   node.inputs[1] != read) {
          place = &found.weight_grad;
        } else if (sums_rows(node, shape.size())) {
          place = &found.bias_grad;
        }
        if (place == nullptr || *place != kNoNode) return false;
        *place = user;
      }
    }
    return true;
  }

  // Whether the node reshapes the rows of `value` only.
  bool keeps_columns(const Node& node, ValueId value) const {
    if (node.op != "Reshape" || node.inputs[0] != value) return false;
    const Shape& from = graph_.value(value).shape;
    const Shape& to = graph_.value(node.outputs[0]).shape;
    return !from.empty() && !to.empty() && to.back() == from.back();
  }

  // ReduceSum over all axes but the last.
  bool sums_rows(const Node& node, size_t rank) const {
    if (node.op != "ReduceSum" || !node.domain.empty() || node.inputs.size() != 2) return false;
    const AttributeReader attrs(op_registry().get(node.domain, node.op), node);
    const Value& axes = graph_.value(node.inputs[1]);
    if (attrs.int_("keepdims") != 0 || axes.kind != ValueKind::constant) return false;
    std::set<int64_t> summed;
    for (int64_t axis : axes.constant.to_int64s()) summed.insert(normalize_axis(axis, rank));
    return summed.size() + 1 == rank && summed.count(static_cast<int64_t>(rank) - 1) == 0;
  }

  Graph& graph_;
  const std::vector<std::vector<NodeId>> users_;
  std::set<ValueId> visible_;
};

}  // namespace

Pass fuse_classifier_loss() {
  return {.name = "fuse_classifier_loss",
          .summary = "The backward of a linear classifier and its loss skips rows without label.",
          .run = [](Graph& graph) { return Fusion(graph).run(); }};
}

}  // namespace ortrain
