// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/grad_context.h"

#include "ortrain/base/error.h"
#include "ortrain/ir/graph_assembler.h"
#include "ortrain/ir/infer_context.h"

namespace ortrain {

GradContext::GradContext(Graph& graph, const OpDef& def, NodeId node,
                         std::vector<ValueId> output_grads, std::vector<bool> needs_grad)
    : GraphBuilder(graph),
      def_(&def),
      node_(node),
      output_grads_(std::move(output_grads)),
      needs_grad_(std::move(needs_grad)),
      input_grads_(needs_grad_.size(), kNoValue) {
  set_phase(Phase::backward);
  set_layer(graph.node(node).name);
}

bool GradContext::has_input(size_t index) const {
  return index < node().inputs.size() && node().inputs[index] != kNoValue;
}

ValueId GradContext::input(size_t index) const {
  return has_input(index) ? node().inputs[index] : kNoValue;
}

ValueId GradContext::output(size_t index) {
  if (index < node().outputs.size() && node().outputs[index] != kNoValue) {
    return node().outputs[index];
  }
  add_outputs(index, index + 1);
  return node().outputs[index];
}

void GradContext::add_outputs(size_t begin, size_t end) {
  Node widened = node();
  if (widened.outputs.size() < end) widened.outputs.resize(end, kNoValue);
  std::vector<size_t> added;
  for (size_t i = begin; i < end; ++i) {
    if (widened.outputs[i] != kNoValue) continue;
    // The id that it will have: inference names extents by it.
    widened.outputs[i] = static_cast<ValueId>(graph().num_values() + added.size());
    added.push_back(i);
  }
  if (added.empty()) return;
  const std::vector<InferredValue> inferred =
      infer_node(*def_, widened, inferred_inputs(graph(), widened));
  for (size_t i : added) {
    const ValueId id =
        graph().add_value(widened.name.empty() ? widened.op : widened.name + "/" + widened.op,
                          inferred[i].dtype, inferred[i].shape);
    graph().value(id).producer = node_;
    graph().value(id).output_index = static_cast<int>(i);
    check(widened.outputs[i] == id, "values are numbered in order");
  }
  graph().node(node_).outputs = std::move(widened.outputs);
}

void GradContext::set_forward_attribute(const std::string& name, Attribute value) {
  check(def_->find_attribute(name) != nullptr, "the operator has no such attribute");
  graph().node(node_).attributes[name] = std::move(value);
}

bool GradContext::has_output_grad(size_t index) const {
  return index < output_grads_.size() && output_grads_[index] != kNoValue;
}

ValueId GradContext::output_grad(size_t index) const {
  return has_output_grad(index) ? output_grads_[index] : kNoValue;
}

ValueId GradContext::output_grad_or_zeros(size_t index) {
  return has_output_grad(index) ? output_grads_[index] : zeros_like(output(index));
}

bool GradContext::needs_grad(size_t index) const {
  return index < needs_grad_.size() && needs_grad_[index];
}

void GradContext::set_input_grad(size_t index, ValueId gradient) {
  check(needs_grad(index), "nobody asked for this gradient");
  const Value& wanted = value(input(index));
  const Value& given = value(gradient);
  if (given.dtype != wanted.dtype || given.shape.size() != wanted.shape.size()) {
    throw InternalError(str(Graph::context(node()), "the gradient of input ", index, " is ",
                            name_of(given.dtype), shape_str(given.shape), ", the input is ",
                            name_of(wanted.dtype), shape_str(wanted.shape)));
  }
  input_grads_[index] = gradient;
}

void GradContext::set_foreign_input_grad(size_t index, ValueId gradient) {
  if (index >= num_inputs() || !has_input(index)) {
    throw InvalidModelError(str("there is no input ", index));
  }
  if (!needs_grad(index)) return;
  const Value& wanted = value(input(index));
  const Value& given = value(gradient);
  if (given.dtype != wanted.dtype) {
    throw DTypeError(str("the gradient of input ", index, " is ", name_of(given.dtype),
                         ", the input is ", name_of(wanted.dtype)));
  }
  if (given.shape != wanted.shape) {
    throw ShapeError(str("the gradient of input ", index, " has shape ", shape_str(given.shape),
                         ", the input has ", shape_str(wanted.shape)));
  }
  set_input_grad(index, gradient);
}

ValueId GradContext::reduce_foreign_to_shape_of(ValueId a, ValueId like) {
  const Shape& from = shape(a);
  const Shape& to = shape(like);
  bool fits = to.size() <= from.size();
  for (size_t i = 0; fits && i < to.size(); ++i) {
    const Dim& given = from[from.size() - to.size() + i];
    const bool is_known = to[i].is_constant() && given.is_constant();
    fits = !is_known || to[i].is(1) || to[i] == given;
  }
  if (!fits) {
    throw ShapeError(str("a shape of ", shape_str(to), " does not broadcast to ", shape_str(from)));
  }
  return reduce_to_shape_of(a, like);
}

}  // namespace ortrain
