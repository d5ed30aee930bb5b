// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ortrain/ir/graph.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain {

// A node whose outputs are given by name; "" is an output nobody wants.
struct NamedNode {
  std::string op;
  std::string domain;
  std::string name;
  std::vector<ValueId> inputs;
  std::vector<std::string> outputs;
  Attributes attributes;
  Phase phase = Phase::forward;
  int checkpoint = 0;
};

// Builds a graph in the order of a file, where values are known by name. Types and shapes of
// computed values are inferred. Every name stands for one value; InvalidModelError otherwise.
class GraphAssembler {
 public:
  explicit GraphAssembler(const OpRegistry& registry) : registry_(&registry) {}

  Graph& graph() { return graph_; }
  const Graph& graph() const { return graph_; }
  const OpRegistry& registry() const { return *registry_; }

  ValueId add_input(GraphInput input, const std::string& name, DType dtype, Shape shape);
  ValueId add_constant(TensorData data, const std::string& name);
  // Gets a name that nothing else in the file has; small ones are shared.
  ValueId add_unnamed_constant(TensorData data);
  // Adds the node, or the nodes that it stands for, by the newest meaning of its operator or `def`.
  // Throws InvalidModelError for bad structure, UnsupportedError for an unknown operator, and what
  // inference throws; every message names the node.
  void add_node(NamedNode node, const OpDef* def = nullptr);
  // Another name for a value that exists.
  void add_alias(const std::string& name, ValueId value);
  // kNoValue when no value has this name yet.
  ValueId find(const std::string& name) const;
  // Throws InvalidModelError where the graph breaks a rule of `verify`, or a name cannot be shown as
  // it is: what comes out of a file must not steer terminals, or put lines of its own into logs.
  Graph finish();

 private:
  void expand(const OpDef& def, Node node, const std::vector<std::string>& outputs);
  // Binds `name` to the value that is added next.
  void claim(const std::string& name);
  void bind(const std::string& name, ValueId value);
  // Gives another name to what holds this one in the graph without the file's doing.
  void vacate(const std::string& name);

  const OpRegistry* registry_;
  size_t expanded_ = 0;  // values that came of operators that stand for others
  Graph graph_;
  std::unordered_map<std::string, ValueId> by_name_;
};

// What inference sees of the inputs of `node`.
std::vector<InferredValue> inferred_inputs(const Graph& graph, const Node& node);

}  // namespace ortrain
