// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/shape_inference.h"

#include <numeric>

#include "ortrain/base/error.h"

namespace ortrain {

std::vector<Dim> required_known(const InferContext& context, size_t index, std::string_view name) {
  if (!context.known(index)) {
    throw UnsupportedError(str("input '", name,
                               "' must be a constant or follow from shapes: its contents decide ",
                               "the shape of the result"));
  }
  return *context.known(index);
}

std::vector<int64_t> required_ints(const InferContext& context, size_t index,
                                   std::string_view name) {
  const std::vector<Dim> contents = required_known(context, index, name);
  if (!is_constant(contents)) {
    throw UnsupportedError(
        str("input '", name, "' must hold plain integers, it holds ", shape_str(contents)));
  }
  return to_dims(contents);
}

int64_t required_int(const InferContext& context, size_t index, std::string_view name) {
  const std::vector<int64_t> contents = required_ints(context, index, name);
  if (contents.size() != 1) {
    throw ShapeError(str("input '", name, "' must hold one element, it has the shape ",
                         shape_str(context.shape(index))));
  }
  return contents[0];
}

std::vector<int64_t> normalize_axes(const std::vector<int64_t>& axes, size_t rank) {
  std::vector<int64_t> result;
  std::vector<bool> seen(rank, false);
  for (int64_t axis : axes) {
    const int64_t positive = normalize_axis(axis, rank);
    if (seen[static_cast<size_t>(positive)]) {
      throw ShapeError(str("axis ", axis, " stands twice in ", dims_str(axes)));
    }
    seen[static_cast<size_t>(positive)] = true;
    result.push_back(positive);
  }
  return result;
}

std::vector<int64_t> normalize_axes_or_all(const std::optional<std::vector<int64_t>>& axes,
                                           size_t rank) {
  return given_axes_or_all(axes && axes->empty() ? std::nullopt : axes, rank);
}

std::vector<int64_t> given_axes_or_all(const std::optional<std::vector<int64_t>>& axes,
                                       size_t rank) {
  if (axes) return normalize_axes(*axes, rank);
  std::vector<int64_t> all(rank);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

Dim same_extent(const Dim& a, const Dim& b) {
  if (a == b || !b.is_constant()) return a;
  if (!a.is_constant()) return b;
  throw ShapeError(str("extents ", a.str(), " and ", b.str(), " must be equal"));
}

Dim checked_add(const Dim& a, const Dim& b) {
  if (a.is_constant() && b.is_constant()) {
    int64_t sum = 0;
    if (__builtin_add_overflow(a.constant(), b.constant(), &sum)) {
      throw ShapeError(str("the extent ", a.str(), " + ", b.str(), " overflows"));
    }
    return sum;
  }
  return a + b;
}

void check_input_shape(const InferContext& context, size_t index, const Shape& wanted) {
  const Shape& given = context.shape(index);
  bool fits = given.size() == wanted.size();
  for (size_t i = 0; fits && i < given.size(); ++i) {
    fits = given[i] == wanted[i] || !given[i].is_constant() || !wanted[i].is_constant();
  }
  if (fits) return;
  throw ShapeError(str("'", context.input_name(index), "' has the shape ", shape_str(given),
                       ", expected ", shape_str(wanted)));
}

Dim checked_mul(const Dim& a, const Dim& b) {
  if (a.is_constant() && b.is_constant()) {
    int64_t product = 0;
    if (__builtin_mul_overflow(a.constant(), b.constant(), &product)) {
      throw ShapeError(str("the extent ", a.str(), " * ", b.str(), " overflows"));
    }
    return product;
  }
  return a * b;
}

Dim checked_product(const Shape& shape) {
  Dim product(1);
  // A zero anywhere makes the product zero, whatever overflows beside it.
  for (const Dim& dim : shape) {
    if (dim.is(0)) return Dim(0);
  }
  for (const Dim& dim : shape) product = checked_mul(product, dim);
  return product;
}

std::optional<std::vector<int64_t>> value_ints(const Graph& graph, ValueId id) {
  const Value& value = graph.value(id);
  if (value.constant.defined()) return value.constant.to_int64s();
  if (value.known && is_constant(*value.known)) return to_dims(*value.known);
  // As InferContext::known.
  const bool is_empty = is_integer(value.dtype) && value.shape.size() == 1 && value.shape[0].is(0);
  return is_empty ? std::optional(std::vector<int64_t>()) : std::nullopt;
}

ValueId extents_at(GraphBuilder& builder, ValueId a, const std::vector<int64_t>& axes) {
  std::vector<int64_t> extents;
  for (int64_t axis : axes) {
    const Dim& extent = builder.shape(a)[static_cast<size_t>(axis)];
    if (!extent.is_constant()) {
      return builder.op("Gather", {builder.shape_of(a), builder.int64s(axes)});
    }
    extents.push_back(extent.constant());
  }
  return builder.int64s(extents);
}

ValueId concat_ints(GraphBuilder& builder, const std::vector<ValueId>& parts) {
  if (parts.size() == 1) return parts[0];
  std::vector<int64_t> all;
  for (ValueId part : parts) {
    const std::optional<std::vector<int64_t>> ints = value_ints(builder.graph(), part);
    if (!ints) return builder.op("Concat", parts, {{"axis", int64_t{0}}});
    all.insert(all.end(), ints->begin(), ints->end());
  }
  return builder.int64s(all);
}

}  // namespace ortrain
