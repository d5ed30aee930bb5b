// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/expand_context.h"

#include <numeric>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/ir/graph_assembler.h"
#include "ortrain/ir/infer_context.h"

namespace ortrain {
namespace {

// A file of a few bytes may declare any extent: longer lists are made when the graph runs.
constexpr int64_t kMostListed = 1024;

}  // namespace

ExpandContext::ExpandContext(Graph& graph, const OpDef& def, const Node& node)
    : GraphBuilder(graph), def_(&def), node_(&node) {
  set_phase(node.phase);
  set_layer(node.name);
  set_checkpoint(node.checkpoint);
}

bool ExpandContext::has_input(size_t index) const { return input(index) != kNoValue; }

ValueId ExpandContext::input(size_t index) const {
  return index < node_->inputs.size() ? node_->inputs[index] : kNoValue;
}

bool ExpandContext::wants_output(size_t index) const {
  return index < node_->outputs.size() && node_->outputs[index] != kNoValue;
}

int64_t ExpandContext::known_extent(ValueId value, size_t axis, const char* what) const {
  const Shape& extents = shape(value);
  if (axis >= extents.size()) {
    throw ShapeError(str(what, " has the shape ", shape_str(extents), ", without axis ", axis));
  }
  if (!extents[axis].is_constant()) {
    throw UnsupportedError(
        str("axis ", axis, " of ", what, " must be known, its shape is ", shape_str(extents)));
  }
  return extents[axis].constant();
}

std::vector<int64_t> ExpandContext::known_ints(size_t index) const {
  const Value& held = value(input(index));
  const char* name = def_->formal_input(index)->name.c_str();
  if (auto known = known_integers(held)) return *std::move(known);
  throw UnsupportedError(str("input '", name, "' must be a constant or follow from shapes"));
}

std::optional<std::vector<int64_t>> known_integers(const Value& value) {
  if (value.known && is_constant(*value.known)) return to_dims(*value.known);
  if (value.constant.defined() && !is_float(value.constant.dtype())) {
    return value.constant.to_int64s();
  }
  return std::nullopt;
}

void ExpandContext::check_listed(int64_t count, const char* what) {
  if (count <= kMostListed) return;
  throw UnsupportedError(str("a form that is written out for each of ", count, " ", what,
                             "; up to ", kMostListed, " are supported"));
}

ValueId ExpandContext::slice(ValueId a, int64_t axis, int64_t begin, int64_t end) {
  return op("Slice", {a, int64s({begin}), int64s({end}), int64s({axis})});
}

ValueId ExpandContext::concat(std::vector<ValueId> parts, int64_t axis) {
  if (parts.size() == 1) return parts[0];
  return op("Concat", std::move(parts), {{"axis", axis}});
}

ValueId ExpandContext::reduce(std::string_view op_name, ValueId a, const std::vector<int64_t>& axes,
                              bool keepdims) {
  return op(op_name, {a, int64s(axes)}, {{"keepdims", static_cast<int64_t>(keepdims)}});
}

ValueId ExpandContext::extent_of(ValueId a, int64_t axis) {
  const Dim& extent = dim_of(a, axis);
  if (extent.is_constant()) return int64s({extent.constant()});
  return op("Shape", {a}, {{"start", axis}, {"end", axis + 1}});
}

ValueId ExpandContext::positions(ValueId a, int64_t axis) {
  const Dim& extent = dim_of(a, axis);
  if (extent.is_constant() && extent.constant() <= kMostListed) {
    std::vector<int64_t> values(static_cast<size_t>(extent.constant()));
    std::iota(values.begin(), values.end(), 0);
    return int64s(values);
  }
  const ValueId count = squeeze(extent_of(a, axis), {0});
  return op("Range", {scalar(DType::i64, 0), count, scalar(DType::i64, 1)});
}

const Dim& ExpandContext::dim_of(ValueId a, int64_t axis) const {
  const Shape& extents = shape(a);
  if (axis < 0 || axis >= static_cast<int64_t>(extents.size())) {
    throw ShapeError(str("a value of shape ", shape_str(extents), " has no axis ", axis));
  }
  return extents[static_cast<size_t>(axis)];
}

namespace {

std::vector<ValueId> build(Graph& graph, const OpDef& def, const Node& node,
                           const std::function<std::vector<ValueId>(ExpandContext&)>& form) {
  check_node(def, node, inferred_inputs(graph, node));
  return with_context(Graph::context(node), [&] {
    ExpandContext context(graph, def, node);
    std::vector<ValueId> made = form(context);
    const size_t results = made.size();
    const bool variadic = !def.outputs.empty() && def.outputs.back().arity == Arity::variadic;
    made.resize(node.outputs.size(), kNoValue);
    for (size_t i = 0; i < made.size(); ++i) {
      if (!context.wants_output(i)) {
        made[i] = kNoValue;
      } else if (i >= results && variadic) {
        throw InvalidModelError(str("has ", made.size(), " outputs, of its inputs come ", results));
      } else if (made[i] == kNoValue) {
        throw InternalError(str("expansion left output ", i, " without a value"));
      }
    }
    return made;
  });
}

}  // namespace

std::vector<ValueId> expand_node(Graph& graph, const OpDef& def, const Node& node) {
  return build(graph, def, node, def.expand);
}

std::vector<ValueId> standard_form_of(Graph& graph, const OpDef& def, const Node& node) {
  return build(graph, def, node, def.standard_form);
}

}  // namespace ortrain
