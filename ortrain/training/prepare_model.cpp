// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/prepare_model.h"

#include <algorithm>

#include "ortrain/base/error.h"
#include "ortrain/ir/attribute_reader.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/standard_form.h"

namespace ortrain {
namespace {

// Streams of the engine's own captures count from 0.
constexpr int64_t kFirstStream = int64_t{1} << 32;

std::vector<NodeId> nodes_named(const Graph& graph, std::string_view domain, std::string_view op) {
  std::vector<NodeId> result;
  for (NodeId id : graph.order()) {
    if (graph.node(id).op == op && graph.node(id).domain == domain) result.push_back(id);
  }
  return result;
}

double constant_or(const Graph& graph, const Node& node, size_t input, double otherwise) {
  if (input >= node.inputs.size() || node.inputs[input] == kNoValue) return otherwise;
  const Value& value = graph.value(node.inputs[input]);
  if (value.kind != ValueKind::constant) {
    throw UnsupportedError(
        str(Graph::context(node), "its input ", input, " must be known before the graph runs"));
  }
  return value.constant.to_double();
}

ValueId seed_of(Graph& graph) {
  for (const GraphInput& input : graph.inputs()) {
    if (input.role == InputRole::seed) return input.value;
  }
  return graph.add_input({.role = InputRole::seed}, "seed", DType::i64, {});
}

void replace_output(Graph& graph, NodeId id, size_t output, ValueId by) {
  const Node& node = graph.node(id);
  if (output < node.outputs.size() && node.outputs[output] != kNoValue) {
    graph.replace_uses(node.outputs[output], by);
  }
}

void finish(Graph& graph) {
  graph.sort();
  graph.remove_dead_nodes();
}

// The running statistics, in place of those of the batch.
void use_running_statistics(Graph& graph) {
  for (NodeId id : batch_normalizations_in_training(graph)) {
    Node& node = graph.node(id);
    replace_output(graph, id, 1, node.inputs[3]);
    replace_output(graph, id, 2, node.inputs[4]);
    node.outputs.resize(1);
    node.attributes["training_mode"] = int64_t{0};
  }
  for (NodeId id : nodes_named(graph, kOrtrainDomain, "BatchNormTraining")) {
    const Node node = graph.node(id);
    if (node.inputs.size() != 5 || std::ranges::count(node.inputs, kNoValue) > 0) {
      throw UnsupportedError(
          str(Graph::context(node), "it has no running statistics to use in an evaluation"));
    }
    GraphBuilder builder(graph);
    builder.set_layer(node.name);
    const double epsilon =
        AttributeReader(op_registry().get(node.domain, node.op), node).float_("epsilon");
    const ValueId made = builder.op("BatchNormalization", node.inputs, {{"epsilon", epsilon}});
    replace_output(graph, id, 0, made);
  }
}

}  // namespace

std::vector<NodeId> batch_normalizations_in_training(const Graph& graph) {
  std::vector<NodeId> found = nodes_named(graph, "", "BatchNormalization");
  std::erase_if(found, [&](NodeId id) {
    const Node& node = graph.node(id);
    return AttributeReader(op_registry().get("", node.op), node).int_("training_mode") == 0;
  });
  return found;
}

void drop_updates(Graph& graph) {
  std::erase_if(graph.outputs(),
                [](const GraphOutput& output) { return output.role != OutputRole::user; });
  graph.remove_dead_nodes();
}

void select_outputs(Graph& graph, const std::vector<std::string>& names) {
  std::vector<GraphOutput> kept;
  for (const std::string& name : names) {
    const auto found = std::ranges::find_if(graph.outputs(), [&](const GraphOutput& output) {
      return output.role == OutputRole::user && output.name == name;
    });
    if (found == graph.outputs().end()) {
      throw InvalidModelError(str("there is no output '", name, "'"));
    }
    kept.push_back(*found);
  }
  for (const GraphOutput& output : graph.outputs()) {
    if (output.role != OutputRole::user) kept.push_back(output);
  }
  graph.outputs() = std::move(kept);
  graph.remove_dead_nodes();
}

void expose_value(Graph& graph, const std::string& name) {
  const ValueId value = graph.find_value(name);
  if (value == kNoValue) throw InvalidModelError(str("there is no value '", name, "'"));
  for (const GraphOutput& output : graph.outputs()) {
    if (output.role == OutputRole::user && output.name == name) return;
  }
  const auto after = std::ranges::find_if_not(
      graph.outputs(), [](const GraphOutput& output) { return output.role == OutputRole::user; });
  graph.outputs().insert(after, GraphOutput{.value = value, .name = name});
}

void drop_unused_inputs(Graph& graph) {
  std::vector<bool> used;
  for (const std::vector<NodeId>& users : graph.users()) used.push_back(!users.empty());
  for (const GraphOutput& output : graph.outputs()) used[static_cast<size_t>(output.value)] = true;
  std::erase_if(graph.inputs(), [&](const GraphInput& input) {
    const bool droppable = input.role == InputRole::user || input.role == InputRole::seed;
    return droppable && !used[static_cast<size_t>(input.value)];
  });
}

void draw_dropout_per_run(Graph& graph) {
  int64_t stream = kFirstStream;
  for (NodeId id : nodes_named(graph, "", "Dropout")) {
    const Node node = graph.node(id);
    const double ratio = constant_or(graph, node, 1, 0.5);
    if (constant_or(graph, node, 2, 0.0) == 0.0 || ratio == 0.0) continue;
    GraphBuilder builder(graph);
    builder.set_layer(node.name);
    const std::vector<ValueId> inputs{node.inputs[0], seed_of(graph)};
    const Attributes attributes{{"ratio", ratio}, {"stream", stream++}};
    replace_output(graph, id, 0, builder.own("Dropout", inputs, attributes));
    if (node.outputs.size() > 1 && node.outputs[1] != kNoValue) {
      replace_output(graph, id, 1, builder.own("DropoutMask", inputs, attributes));
    }
  }
  finish(graph);
}

void leave_out_training(Graph& graph) {
  drop_updates(graph);
  for (const std::string_view domain : {std::string_view(), kOrtrainDomain}) {
    for (NodeId id : nodes_named(graph, domain, "Dropout")) {
      replace_output(graph, id, 0, graph.node(id).inputs[0]);
      if (graph.node(id).outputs.size() < 2 || graph.node(id).outputs[1] == kNoValue) continue;
      GraphBuilder builder(graph);
      builder.set_layer(graph.node(id).name);
      const ValueId all = builder.cast(builder.ones_like(graph.node(id).inputs[0]), DType::boolean);
      replace_output(graph, id, 1, all);
    }
  }
  for (NodeId id : nodes_named(graph, kOrtrainDomain, "DropoutMask")) {
    graph.node(id).attributes["ratio"] = 0.0;
  }
  for (NodeId id : nodes_named(graph, kOrtrainDomain, "Attention")) {
    graph.node(id).attributes["dropout"] = 0.0;
  }
  use_running_statistics(graph);
  finish(graph);
}

void prepare_for_others(Graph& graph, const std::vector<std::string>& outputs) {
  drop_updates(graph);
  if (!outputs.empty()) select_outputs(graph, outputs);
  to_standard_operators(graph);
  drop_unused_inputs(graph);
}

}  // namespace ortrain
