// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/plan/resolve_shapes.h"

#include <map>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/error.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain {
namespace {

size_t index_of(ValueId id) { return static_cast<size_t>(id); }

// Input extents against what the graph was built for: equal integers, one value per symbol.
void check_input(const Graph& graph, const GraphInput& input, const Dims& dims,
                 std::map<std::string, std::pair<int64_t, std::string>>& symbols) {
  const Value& value = graph.value(input.value);
  if (dims.size() != value.shape.size()) {
    throw ShapeError(str("input '", value.name, "' has rank ", dims.size(), " (", dims_str(dims),
                         "), expected ", value.shape.size(), " (", shape_str(value.shape), ")"));
  }
  for (size_t axis = 0; axis < dims.size(); ++axis) {
    const Dim& expected = value.shape[axis];
    if (expected.is_constant()) {
      if (expected.constant() == dims[axis]) continue;
      throw ShapeError(str("input '", value.name, "' has shape ", dims_str(dims), ", expected ",
                           shape_str(value.shape)));
    }
    const std::string place = str("axis ", axis, " of '", value.name, "'");
    auto [bound, fresh] = symbols.emplace(expected.str(), std::make_pair(dims[axis], place));
    if (!fresh && bound->second.first != dims[axis]) {
      throw ShapeError(str(place, " is ", dims[axis], ", but ", bound->second.second, " is ",
                           bound->second.first, "; both are '", expected.str(), "'"));
    }
  }
}

// Incoming gradients have the shapes of the outputs they belong to.
void bind_gradients(const Graph& graph, ResolvedShapes& resolved) {
  for (const GraphInput& input : graph.inputs()) {
    if (input.role != InputRole::gradient) continue;
    for (const GraphOutput& output : graph.outputs()) {
      if (output.role == OutputRole::user && output.name == input.target) {
        resolved.dims[index_of(input.value)] = resolved.dims[index_of(output.value)];
      }
    }
  }
}

}  // namespace

ResolvedShapes resolve_shapes(const Graph& graph, const std::vector<Dims>& input_dims) {
  check(input_dims.size() == graph.inputs().size(), "one shape per graph input is needed");
  ResolvedShapes resolved;
  resolved.dims.resize(graph.num_values());
  resolved.known.resize(graph.num_values());
  std::map<std::string, std::pair<int64_t, std::string>> symbols;

  for (size_t i = 0; i < input_dims.size(); ++i) {
    const GraphInput& input = graph.inputs()[i];
    if (input.role == InputRole::gradient) continue;
    check_input(graph, input, input_dims[i], symbols);
    const Value& value = graph.value(input.value);
    with_context(str("input '", value.name, "': "),
                 [&] { check_extents(input_dims[i], size_of(value.dtype)); });
    resolved.dims[index_of(input.value)] = input_dims[i];
  }
  for (size_t id = 0; id < graph.num_values(); ++id) {
    const Value& value = graph.value(static_cast<ValueId>(id));
    if (value.kind != ValueKind::constant) continue;
    resolved.dims[id] = value.constant.dims();
    if (value.known) resolved.known[id] = to_dims(*value.known);
  }

  bool gradients_bound = false;
  for (NodeId node_id : graph.order()) {
    const Node& node = graph.node(node_id);
    if (node.phase == Phase::backward && !gradients_bound) {
      gradients_bound = true;  // every forward value is resolved now
      bind_gradients(graph, resolved);
    }
    std::vector<InferredValue> inputs;
    inputs.reserve(node.inputs.size());
    for (ValueId id : node.inputs) {
      if (id == kNoValue) {
        inputs.emplace_back();
        continue;
      }
      InferredValue input{graph.value(id).dtype,
                          to_shape(resolved.dims[index_of(id)]),
                          {},
                          graph.value(id).constant};
      if (const auto& known = resolved.known[index_of(id)]) input.known = to_shape(*known);
      inputs.push_back(std::move(input));
    }
    const OpDef& def = op_registry().get(node.domain, node.op);
    const std::vector<InferredValue> outputs = infer_node(def, node, std::move(inputs));
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (node.outputs[i] == kNoValue) continue;
      if (!is_constant(outputs[i].shape)) {
        throw UnsupportedError(str(Graph::context(node), "the shape of its result, ",
                                   shape_str(outputs[i].shape), ", depends on data"));
      }
      const size_t id = index_of(node.outputs[i]);
      resolved.dims[id] = to_dims(outputs[i].shape);
      with_context(Graph::context(node), [&] {
        check_extents(resolved.dims[id], size_of(graph.value(node.outputs[i]).dtype));
      });
      if (outputs[i].known && is_constant(*outputs[i].known)) {
        resolved.known[id] = to_dims(*outputs[i].known);
      }
    }
  }
  if (!gradients_bound) bind_gradients(graph, resolved);
  return resolved;
}

}  // namespace ortrain
