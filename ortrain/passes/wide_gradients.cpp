// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/wide_gradients.h"

#include <algorithm>
#include <string_view>

#include "ortrain/ir/attribute_reader.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/passes/move_casts.h"
#include "ortrain/passes/pass_notes.h"

namespace ortrain {
namespace {

// The operator that gives the sums of `node` unrounded; none: empty.
std::string_view wide_form(const Node& node) {
  if (node.domain == kOrtrainDomain) {
    return node.op == "LinearWeightGrad" && node.inputs.size() == 2 ? "WideLinearWeightGrad" : "";
  }
  if (!node.domain.empty()) return "";
  if (node.op == "ReduceSum") return "WideReduceSum";
  if (node.op != "Gemm" || node.inputs.size() != 2) return "";
  const AttributeReader attrs(op_registry().get(node.domain, node.op), node);
  const bool is_weight_grad =
      attrs.int_("transA") != 0 && attrs.int_("transB") == 0 && attrs.float_("alpha") == 1.0;
  return is_weight_grad ? "WideLinearWeightGrad" : "";
}

// Per value whether it is computed from a gradient that the backward is given. What a checkpoint or
// a budget of memory computes again in the backward is not.
std::vector<bool> from_gradients(const Graph& graph) {
  std::vector<bool> found(graph.num_values(), false);
  for (const GraphInput& input : graph.inputs()) {
    if (input.role == InputRole::gradient) found[static_cast<size_t>(input.value)] = true;
  }
  for (NodeId id : graph.order()) {
    const Node& node = graph.node(id);
    const bool comes = std::ranges::any_of(node.inputs, [&](ValueId input) {
      return input != kNoValue && found[static_cast<size_t>(input)];
    });
    if (!comes) continue;
    for (ValueId output : node.outputs) {
      if (output != kNoValue) found[static_cast<size_t>(output)] = true;
    }
  }
  return found;
}

bool run(Graph& graph) {
  const std::vector<bool> is_gradient = from_gradients(graph);
  std::vector<size_t> uses;
  for (const auto& list : graph.users()) uses.push_back(list.size());
  for (const GraphOutput& output : graph.outputs()) ++uses[static_cast<size_t>(output.value)];

  GraphBuilder builder(graph);
  bool changed = false;
  const std::vector<NodeId> order = graph.order();
  for (NodeId id : order) {
    const Node cast = graph.node(id);
    if (cast.op != "Cast" || !cast.domain.empty() || cast.phase != Phase::backward) continue;
    ValueId narrow = cast.inputs[0];
    if (graph.value(cast.outputs[0]).dtype != DType::f32 ||
        graph.value(narrow).dtype != DType::bf16 || !is_gradient[static_cast<size_t>(narrow)]) {
      continue;
    }
    // Views and transposes in between are made of the wide sums.
    NodeId made_by = graph.value(narrow).producer;
    std::vector<Node> moves;  // the last first
    while (made_by != kNoNode && only_moves(graph.node(made_by)) &&
           uses[static_cast<size_t>(narrow)] == 1) {
      moves.push_back(graph.node(made_by));
      narrow = moves.back().inputs[0];
      made_by = graph.value(narrow).producer;
    }
    if (made_by == kNoNode) continue;
    const Node sum = graph.node(made_by);
    const std::string_view form = wide_form(sum);
    if (form.empty() || sum.phase != cast.phase || sum.checkpoint != cast.checkpoint) continue;
    PassNotes* const notes = PassNotes::current();
    if (uses[static_cast<size_t>(narrow)] != 1) {
      if (notes) notes->refused(graph, {made_by, id}, "others read the rounded sums too");
      continue;
    }
    builder.set_phase(sum.phase);
    builder.set_layer(sum.name);
    builder.set_checkpoint(sum.checkpoint);
    const Attributes attributes = form == "WideReduceSum" ? sum.attributes : Attributes{};
    ValueId wide = builder.node(std::string(kOrtrainDomain), std::string(form), sum.inputs,
                                attributes, {true})[0];
    if (notes) notes->taken(graph, graph.value(wide).producer, {made_by, id});
    for (auto move = moves.rbegin(); move != moves.rend(); ++move) {
      std::vector<ValueId> inputs = move->inputs;
      inputs[0] = wide;
      wide = builder.node(move->domain, move->op, std::move(inputs), move->attributes, {true})[0];
    }
    graph.replace_uses(cast.outputs[0], wide);
    changed = true;
  }
  return changed;
}

}  // namespace

Pass wide_gradients() {
  return {.name = "wide_gradients",
          .summary =
              "On GPUs, bfloat16 gradients that are only cast to float32 are given as they "
              "were summed.",
          .run = run,
          .of_gpus = true,
          .takes_memory = true};
}

}  // namespace ortrain
