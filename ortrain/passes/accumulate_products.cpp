// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/accumulate_products.h"

#include <algorithm>

#include "ortrain/ir/use_index.h"
#include "ortrain/passes/pass_notes.h"

namespace ortrain {
namespace {

// A product, or sum of rows, without a base yet.
bool takes_base(const Graph& graph, ValueId value) {
  const NodeId id = graph.value(value).producer;
  if (id == kNoNode) return false;
  const Node& node = graph.node(id);
  if (node.domain != kOrtrainDomain) return false;
  if (node.op == "EmbeddingGrad") return node.inputs.size() == 3;
  return node.inputs.size() == 2 && (node.op == "LinearInputGrad" || node.op == "LinearWeightGrad");
}

// Notes why a product does not start from what it is added to.
void refuse(const Graph& graph, ValueId product, NodeId sum, const char* reason) {
  if (PassNotes* notes = PassNotes::current()) {
    notes->refused(graph, {graph.value(product).producer, sum}, reason);
  }
}

bool run(Graph& graph) {
  std::vector<int> uses(graph.num_values(), 0);
  std::vector<int> position(graph.num_node_slots(), -1);
  for (size_t i = 0; i < graph.order().size(); ++i) {
    position[static_cast<size_t>(graph.order()[i])] = static_cast<int>(i);
    for (ValueId input : graph.node(graph.order()[i]).inputs) {
      if (input != kNoValue) ++uses[static_cast<size_t>(input)];
    }
  }
  for (const GraphOutput& output : graph.outputs()) ++uses[static_cast<size_t>(output.value)];
  const auto made_at = [&](ValueId value) {
    const NodeId producer = graph.value(value).producer;
    return producer == kNoNode ? -1 : position[static_cast<size_t>(producer)];
  };

  bool changed = false;
  UseIndex index(graph);
  const std::vector<NodeId> order = graph.order();
  for (NodeId id : order) {
    Node& add = graph.node(id);
    if (add.op != "Add" || !add.domain.empty()) continue;
    const ValueId sum = add.outputs[0];
    // The later of the two takes the other as its base: neither has to wait.
    std::vector<ValueId> products = add.inputs;
    std::ranges::stable_sort(products,
                             [&](ValueId a, ValueId b) { return made_at(a) > made_at(b); });
    for (ValueId product : products) {
      const ValueId base = product == add.inputs[0] ? add.inputs[1] : add.inputs[0];
      if (base == product || !takes_base(graph, product)) continue;
      if (uses[static_cast<size_t>(product)] != 1) {
        refuse(graph, product, id, "others read the product too");
        continue;
      }
      if (!(graph.value(base).shape == graph.value(product).shape)) {
        refuse(graph, product, id, "their shapes differ");
        continue;
      }
      Node& maker = graph.node(graph.value(product).producer);
      if (maker.phase != add.phase || made_at(base) > made_at(product)) {
        refuse(graph, product, id, "the product is made before what it is added to");
        continue;
      }
      if (PassNotes* notes = PassNotes::current()) {
        const NodeId made_by = graph.value(product).producer;
        notes->taken(graph, made_by, {made_by, id});
      }
      maker.inputs.push_back(base);
      // `base` is read by the product now instead of by the sum.
      index.note_reads(graph.value(product).producer);
      index.replace_uses(sum, product);
      uses[static_cast<size_t>(product)] = uses[static_cast<size_t>(sum)];
      uses[static_cast<size_t>(sum)] = 0;
      add.inputs = {base, base};  // dead: nobody reads the sum
      index.note_reads(id);
      changed = true;
      break;
    }
  }
  return changed;
}

}  // namespace

Pass accumulate_products() {
  return {.name = "accumulate_products",
          .summary =
              "Matrix products and embedding gradients that are added to something start from "
              "it (beta = 1).",
          .run = run};
}

}  // namespace ortrain
