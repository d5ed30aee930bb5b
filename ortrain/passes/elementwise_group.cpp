// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/elementwise_group.h"

#include <algorithm>
#include <vector>

#include "ortrain/ir/attribute_reader.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain {
namespace {

// A row that is reduced is held as a whole, register by register.
constexpr int64_t kMaxColumns = 65536;
// What the SIMD executors hold in registers or convert from and to.
constexpr DTypeSet kFusedTypes = kFloatTypes | kIndexTypes | kBoolTypes;

Shape row_shape(Shape shape) {
  if (!shape.empty()) shape.back() = Dim(1);
  return shape;
}

bool has_fused_types(const Graph& graph, const Node& node) {
  const auto fits = [&](ValueId id) {
    return id == kNoValue || kFusedTypes.contains(graph.value(id).dtype);
  };
  return std::all_of(node.inputs.begin(), node.inputs.end(), fits) && fits(node.outputs[0]);
}

bool is_shape_arithmetic(const Value& value) {
  return value.known.has_value() || (!is_float(value.dtype) && value.shape.size() <= 1);
}

// Null for a reduction of the last axis alone that keeps it, else what it is instead.
const char* why_no_row_reduction(const Graph& graph, const Node& node, const OpDef& def) {
  const AttributeReader attrs(def, node);
  const Value& input = graph.value(node.inputs[0]);
  if (attrs.int_("keepdims") == 0) return "drops the axis that it reduces";
  if (input.dtype == DType::boolean) return "reduces booleans";
  // The mean's sum has more bits than a register of the integers.
  if (node.op == "ReduceMean" && !is_float(input.dtype)) return "averages integers";
  // One row would keep one thread busy, a very long one leaves the caches. A last extent of 1
  // leaves nothing to reduce, and no difference between rows and elements.
  if (input.shape.size() < 2) return "reduces a single row";
  if (input.shape.back().is(1)) return "reduces rows of one element";
  const Dim& columns = input.shape.back();
  if (columns.is_constant() && columns.constant() > kMaxColumns) return "reduces very long rows";
  constexpr const char* kOtherAxes = "reduces other axes than the last";
  if (node.inputs.size() < 2 || node.inputs[1] == kNoValue) return kOtherAxes;
  const int64_t last = static_cast<int64_t>(input.shape.size()) - 1;
  const std::optional<std::vector<int64_t>> axes = value_ints(graph, node.inputs[1]);
  const bool is_last = axes && axes->size() == 1 && ((*axes)[0] == last || (*axes)[0] == -1);
  return is_last ? nullptr : kOtherAxes;
}

}  // namespace

std::optional<ExprOp> row_reduction_of(const Node& node) {
  if (!node.domain.empty()) return std::nullopt;
  if (node.op == "ReduceSum") return ExprOp::row_sum;
  if (node.op == "ReduceMean") return ExprOp::row_mean;
  if (node.op == "ReduceMax") return ExprOp::row_max;
  if (node.op == "ReduceMin") return ExprOp::row_min;
  return std::nullopt;
}

std::optional<ElementwiseGroup> group_of(const Graph& graph, const Node& node, std::string* why) {
  const auto refuse = [&](const char* reason) {
    if (why != nullptr) *why = node.op + " " + reason;
    return std::nullopt;
  };
  const OpDef& def = op_registry().get(node.domain, node.op);
  const bool reduces = row_reduction_of(node).has_value();
  if (!def.expression && !reduces) {
    return refuse(def.flops ? "has matrix products" : "is not elementwise");
  }
  if (node.outputs.size() != 1 || node.outputs[0] == kNoValue) return refuse("has several results");
  const Value& output = graph.value(node.outputs[0]);
  if (!has_fused_types(graph, node)) return refuse("has no fused form for these element types");
  if (is_shape_arithmetic(output)) return refuse("computes a shape");
  if (def.expression) {
    return ElementwiseGroup{node.phase, output.shape, def.draws_random_numbers};
  }
  if (const char* reason = why_no_row_reduction(graph, node, def)) return refuse(reason);
  return ElementwiseGroup{node.phase, graph.value(node.inputs[0]).shape, true};
}

std::optional<ElementwiseGroup> join_groups(const ElementwiseGroup& a, const ElementwiseGroup& b,
                                            const char*& why) {
  if (a.phase != b.phase) {
    why = "one is forward, the other backward";
    return std::nullopt;
  }
  if (a.shape == b.shape) {
    ElementwiseGroup joined = a;
    joined.needs_elements = a.needs_elements || b.needs_elements;
    return joined;
  }
  const bool a_is_rows = a.shape == row_shape(b.shape);
  if (!a_is_rows && b.shape != row_shape(a.shape)) {
    why = "their shapes differ";
    return std::nullopt;
  }
  if ((a_is_rows ? a : b).needs_elements) {
    why = "one has a value per row of the other, and its elements count";
    return std::nullopt;
  }
  ElementwiseGroup joined = a_is_rows ? b : a;
  joined.needs_elements = true;
  return joined;
}

}  // namespace ortrain
