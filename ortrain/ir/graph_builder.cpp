// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/graph_builder.h"

#include <numeric>

#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/graph_assembler.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain {
namespace {

// A layer path may end with the operator already.
std::string value_name(const std::string& layer, const std::string& op) {
  if (layer.empty()) return op;
  return layer.ends_with("/" + op) ? layer : layer + "/" + op;
}

}  // namespace

std::vector<ValueId> GraphBuilder::node(std::string_view domain, std::string_view op,
                                        std::vector<ValueId> inputs, Attributes attributes,
                                        std::vector<bool> wanted) {
  const OpDef& def = op_registry().get(domain, op);
  while (!inputs.empty() && inputs.back() == kNoValue) inputs.pop_back();
  while (!wanted.empty() && !wanted.back()) wanted.pop_back();

  Node node;
  node.op = op;
  node.domain = def.domain;
  node.name = layer_;
  node.inputs = std::move(inputs);
  node.attributes = std::move(attributes);
  node.phase = phase_;
  node.checkpoint = checkpoint_;
  // Any id but kNoValue marks the output as wanted while inference runs.
  const ValueId next = static_cast<ValueId>(graph_->num_values());
  for (bool want : wanted) node.outputs.push_back(want ? next : kNoValue);
  if (def.expand && !(keeps_composites_ && def.infer)) return expand_node(*graph_, def, node);

  std::vector<InferredValue> outputs = infer_node(def, node, inferred_inputs(*graph_, node));

  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!wanted[i]) continue;
    const ValueId id =
        graph_->add_value(value_name(layer_, node.op), outputs[i].dtype, outputs[i].shape);
    graph_->value(id).known = std::move(outputs[i].known);
    node.outputs[i] = id;
  }
  std::vector<ValueId> results = node.outputs;
  graph_->add_node(std::move(node));
  return results;
}

ValueId GraphBuilder::op(std::string_view op, std::vector<ValueId> inputs, Attributes attributes) {
  return node("", op, std::move(inputs), std::move(attributes), {true})[0];
}

ValueId GraphBuilder::own(std::string_view op, std::vector<ValueId> inputs, Attributes attributes) {
  return node(kOrtrainDomain, op, std::move(inputs), std::move(attributes), {true})[0];
}

ValueId GraphBuilder::int64s(const std::vector<int64_t>& values) {
  return constant(TensorData::int64s(values));
}

ValueId GraphBuilder::scalar(DType dtype, double value) {
  return constant(TensorData::scalar(dtype, value));
}

ValueId GraphBuilder::cast(ValueId a, DType to) {
  if (dtype(a) == to) return a;
  return op("Cast", {a}, {{"to", static_cast<int64_t>(to)}});
}

ValueId GraphBuilder::shape_of(ValueId a) {
  const Shape& extents = shape(a);
  if (is_constant(extents)) return int64s(to_dims(extents));
  return op("Shape", {a});
}

ValueId GraphBuilder::reshape(ValueId a, const std::vector<int64_t>& extents) {
  return op("Reshape", {a, int64s(extents)});
}

ValueId GraphBuilder::reshape_like(ValueId a, ValueId like) {
  if (shape(a) == shape(like)) return a;
  return reshape(a, shape_of(like));
}

ValueId GraphBuilder::expand_like(ValueId a, ValueId like) {
  if (shape(a) == shape(like)) return a;
  return op("Expand", {a, shape_of(like)});
}

ValueId GraphBuilder::unsqueeze(ValueId a, const std::vector<int64_t>& axes) {
  return op("Unsqueeze", {a, int64s(axes)});
}

ValueId GraphBuilder::squeeze(ValueId a, const std::vector<int64_t>& axes) {
  return op("Squeeze", {a, int64s(axes)});
}

ValueId GraphBuilder::transpose(ValueId a, const std::vector<int64_t>& perm) {
  return op("Transpose", {a}, {{"perm", perm}});
}

ValueId GraphBuilder::transpose_last_two(ValueId a) {
  std::vector<int64_t> perm(static_cast<size_t>(rank(a)));
  std::iota(perm.begin(), perm.end(), 0);
  check(perm.size() >= 2, "a matrix is needed");
  std::swap(perm[perm.size() - 1], perm[perm.size() - 2]);
  return transpose(a, perm);
}

ValueId GraphBuilder::reduce_sum(ValueId a, const std::vector<int64_t>& axes, bool keepdims) {
  const Attributes attributes{{"keepdims", static_cast<int64_t>(keepdims)}};
  if (axes.empty()) return op("ReduceSum", {a}, attributes);
  return op("ReduceSum", {a, int64s(axes)}, attributes);
}

ValueId GraphBuilder::sign_or_zero(ValueId a) {
  const ValueId zero = scalar(dtype(a), 0.0);
  return where(op("Greater", {unary("Abs", a), zero}), unary("Sign", a), zero);
}

ValueId GraphBuilder::zeros_like(ValueId a) {
  void* zero = nullptr;
  TensorData value = TensorData::allocate(dtype(a), {1}, &zero);
  return op("ConstantOfShape", {shape_of(a)}, {{"value", std::move(value)}});
}

ValueId GraphBuilder::ones_like(ValueId a) { return expand_like(scalar(dtype(a), 1.0), a); }

ValueId GraphBuilder::reduce_to_shape_of(ValueId a, ValueId like) {
  const Shape& from = shape(a);
  const Shape& to = shape(like);
  if (from == to) return a;
  check(to.size() <= from.size(), "broadcasting never lowers the rank");
  const size_t extra = from.size() - to.size();
  std::vector<int64_t> axes;
  for (size_t i = 0; i < from.size(); ++i) {
    if (i < extra) {
      axes.push_back(static_cast<int64_t>(i));
      continue;
    }
    const Dim& wanted = to[i - extra];
    if (wanted == from[i]) continue;
    // A symbol may turn out to be 1: only the run can tell.
    if (!wanted.is_constant()) return own("SumToShape", {a, shape_of(like)});
    if (wanted.is(1)) axes.push_back(static_cast<int64_t>(i));
  }
  const ValueId sum = axes.empty() ? a : reduce_sum(a, axes, true);
  return extra == 0 ? sum : reshape(sum, shape_of(like));
}

}  // namespace ortrain
