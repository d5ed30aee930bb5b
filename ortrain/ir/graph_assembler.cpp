// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/graph_assembler.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/base/printable.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/verifier.h"

namespace ortrain {
namespace {

// What a small file may become.
constexpr size_t kMostExpanded = size_t{1} << 17;

void check_name(const char* of, std::string_view name) {
  const std::string shown = printable(name, Breaks::escaped);
  if (shown == name) return;
  throw InvalidModelError(
      str("the name of ", of, " has characters that cannot be shown: '", shown, "'"));
}

}  // namespace

std::vector<InferredValue> inferred_inputs(const Graph& graph, const Node& node) {
  std::vector<InferredValue> result;
  result.reserve(node.inputs.size());
  for (ValueId input : node.inputs) {
    if (input == kNoValue) {
      result.emplace_back();
      continue;
    }
    const Value& value = graph.value(input);
    result.push_back({value.dtype, value.shape, value.known, value.constant});
  }
  return result;
}

ValueId GraphAssembler::find(const std::string& name) const {
  auto found = by_name_.find(name);
  return found == by_name_.end() ? kNoValue : found->second;
}

void GraphAssembler::bind(const std::string& name, ValueId value) {
  if (name.empty()) throw InvalidModelError("a value has an empty name");
  if (!by_name_.emplace(name, value).second) {
    throw InvalidModelError(str("the value name '", name, "' is defined twice"));
  }
}

void GraphAssembler::claim(const std::string& name) {
  bind(name, static_cast<ValueId>(graph_.num_values()));
  vacate(name);
}

void GraphAssembler::vacate(const std::string& name) {
  // Only what no file has named can hold a name that is not in by_name_.
  const ValueId unnamed = graph_.find_value(name);
  if (unnamed != kNoValue) graph_.rename_value(unnamed, name + "_c");
}

ValueId GraphAssembler::add_input(GraphInput input, const std::string& name, DType dtype,
                                  Shape shape) {
  claim(name);
  return graph_.add_input(std::move(input), name, dtype, std::move(shape));
}

ValueId GraphAssembler::add_constant(TensorData data, const std::string& name) {
  claim(name);
  return graph_.add_constant(std::move(data), name);
}

ValueId GraphAssembler::add_unnamed_constant(TensorData data) {
  return graph_.add_constant(std::move(data));
}

void GraphAssembler::add_alias(const std::string& name, ValueId value) { bind(name, value); }

void GraphAssembler::expand(const OpDef& def, Node node, const std::vector<std::string>& outputs) {
  with_context(Graph::context(node), [&] {
    std::set<std::string_view> names;
    for (const std::string& output : outputs) {
      if (output.empty()) continue;
      if (by_name_.contains(output) || !names.insert(output).second) {
        throw InvalidModelError(str("the value name '", output, "' is defined twice"));
      }
    }
  });
  const ValueId next = static_cast<ValueId>(graph_.num_values());
  for (const std::string& output : outputs)
    node.outputs.push_back(output.empty() ? kNoValue : next);
  const size_t before = graph_.num_values();
  const std::vector<ValueId> made = expand_node(graph_, def, node);
  expanded_ += graph_.num_values() - before;
  if (expanded_ > kMostExpanded) {
    throw UnsupportedError(str(Graph::context(node), "operators that stand for others would add ",
                               "more than ", kMostExpanded, " values"));
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].empty()) continue;
    const bool has_name = by_name_.contains(graph_.value(made[i]).name);
    bind(outputs[i], made[i]);
    if (has_name) continue;  // of an input, say: a second name for it
    vacate(outputs[i]);
    graph_.rename_value(made[i], outputs[i]);
  }
}

void GraphAssembler::add_node(NamedNode named, const OpDef* meaning) {
  Node node;
  node.op = std::move(named.op);
  node.domain = std::move(named.domain);
  node.name = std::move(named.name);
  node.inputs = std::move(named.inputs);
  node.attributes = std::move(named.attributes);
  node.phase = named.phase;
  node.checkpoint = named.checkpoint;
  const OpDef& def = with_context(Graph::context(node), [&]() -> const OpDef& {
    return meaning != nullptr ? *meaning : registry_->get(node.domain, node.op);
  });
  node.domain = def.domain;
  if (def.expand) {
    expand(def, std::move(node), named.outputs);
    return;
  }
  // A node whose results have no names makes nothing.
  const auto is_unnamed = [](const std::string& output) { return output.empty(); };
  if (!named.outputs.empty() && std::ranges::all_of(named.outputs, is_unnamed)) return;
  with_context(Graph::context(node), [&] {
    for (const std::string& output : named.outputs) {
      const FormalValue* formal = def.formal_output(node.outputs.size());
      const bool is_required = formal != nullptr && formal->arity == Arity::single;
      if (output.empty() && !is_required) {
        node.outputs.push_back(kNoValue);
        continue;
      }
      if (!output.empty()) claim(output);
      node.outputs.push_back(graph_.add_value(output, DType::undefined, {}));
    }
  });
  std::vector<InferredValue> outputs = infer_node(def, node, inferred_inputs(graph_, node));
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    if (node.outputs[i] == kNoValue) continue;
    Value& value = graph_.value(node.outputs[i]);
    value.dtype = outputs[i].dtype;
    value.shape = std::move(outputs[i].shape);
    value.known = std::move(outputs[i].known);
  }
  graph_.add_node(std::move(node));
}

Graph GraphAssembler::finish() {
  check_name("the graph", graph_.name);
  for (ValueId id = 0; id < static_cast<ValueId>(graph_.num_values()); ++id) {
    check_name("a value", graph_.value(id).name);
  }
  for (const GraphInput& input : graph_.inputs()) {
    check_name("an input's target", input.target);
    check_name("an extent", shape_str(graph_.value(input.value).shape));
  }
  for (const GraphOutput& output : graph_.outputs()) {
    check_name("an output", output.name);
    check_name("an output's target", output.target);
  }
  for (const NodeId id : graph_.order()) check_name("a node", graph_.node(id).name);
  verify(graph_, *registry_);
  return std::move(graph_);
}

}  // namespace ortrain
