// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/merge_attention_heads.h"

#include "ortrain/ir/graph_builder.h"
#include "ortrain/passes/pass_notes.h"

namespace ortrain {
namespace {

bool swaps_heads(const Node& node) {
  if (node.op != "Transpose" || !node.domain.empty()) return false;
  auto perm = node.attributes.find("perm");
  return perm != node.attributes.end() &&
         std::get<std::vector<int64_t>>(perm->second) == std::vector<int64_t>{0, 2, 1, 3};
}

// The [b, s, h, d] value whose heads are swapped to give `value`, with integer h and d.
ValueId source_of(const Graph& graph, ValueId value) {
  const NodeId producer = graph.value(value).producer;
  if (producer == kNoNode || !swaps_heads(graph.node(producer))) return kNoValue;
  const ValueId source = graph.node(producer).inputs[0];
  const Shape& shape = graph.value(source).shape;
  return shape[2].is_constant() && shape[3].is_constant() ? source : kNoValue;
}

bool merge(Graph& graph, NodeId id, const std::vector<std::vector<NodeId>>& users) {
  const Node& node = graph.node(id);
  if (node.op != "Attention" || node.domain != kOrtrainDomain) return false;
  if (auto heads = node.attributes.find("q_num_heads");
      heads != node.attributes.end() && std::get<int64_t>(heads->second) != 0) {
    return false;
  }
  ValueId sources[3];
  for (size_t i = 0; i < 3; ++i) {
    sources[i] = source_of(graph, node.inputs[i]);
    if (sources[i] == kNoValue) {
      return refuse(graph, id, "q, k or v is no transpose of known numbers of heads and columns");
    }
  }
  const ValueId out = node.outputs[0];
  if (out == kNoValue) return false;
  for (const GraphOutput& output : graph.outputs()) {
    if (output.value == out) return refuse(graph, id, "its result is an output of the graph");
  }
  for (NodeId user : users[static_cast<size_t>(out)]) {
    if (!swaps_heads(graph.node(user))) {
      return refuse(graph, id, "its result is read with the heads in front");
    }
  }

  GraphBuilder builder(graph);
  builder.set_phase(node.phase);
  builder.set_layer(node.name);
  builder.set_checkpoint(node.checkpoint);
  std::vector<ValueId> inputs = node.inputs;
  for (size_t i = 0; i < 3; ++i) {
    const Shape shape = graph.value(sources[i]).shape;
    inputs[i] = builder.reshape(sources[i], {0, 0, shape[2].constant() * shape[3].constant()});
  }
  Attributes attributes = node.attributes;
  const int64_t heads = graph.value(sources[0]).shape[2].constant();
  const int64_t value_width = graph.value(sources[2]).shape[3].constant();
  attributes["q_num_heads"] = heads;
  attributes["kv_num_heads"] = graph.value(sources[1]).shape[2].constant();
  const bool wants_logsumexp = node.outputs.size() > 1 && node.outputs[1] != kNoValue;
  const std::vector<ValueId> made = builder.node(kOrtrainDomain, "Attention", std::move(inputs),
                                                 std::move(attributes), {true, wants_logsumexp});
  if (wants_logsumexp) graph.replace_uses(node.outputs[1], made[1]);
  const std::vector<NodeId> readers = users[static_cast<size_t>(out)];
  if (PassNotes* notes = PassNotes::current()) {
    std::vector<NodeId> parts{id};
    for (size_t i = 0; i < 3; ++i) parts.push_back(graph.value(node.inputs[i]).producer);
    parts.insert(parts.end(), readers.begin(), readers.end());
    notes->taken(graph, graph.value(made[0]).producer, parts);
  }
  for (NodeId user : readers) {
    graph.replace_uses(graph.node(user).outputs[0],
                       builder.reshape(made[0], {0, 0, heads, value_width}));
  }
  return true;
}

bool run(Graph& graph) {
  bool changed = false;
  const std::vector<NodeId> order = graph.order();
  const std::vector<std::vector<NodeId>> users = graph.users();
  for (NodeId id : order) changed |= merge(graph, id, users);
  return changed;
}

}  // namespace

Pass merge_attention_heads() {
  return {.name = "merge_attention_heads",
          .summary = "Attention takes [batch, length, heads * width]; transposes go away.",
          .run = run};
}

}  // namespace ortrain
