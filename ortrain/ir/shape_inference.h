// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "ortrain/base/dim.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/ir/infer_context.h"

namespace ortrain {

// Contents of an integer input that inference cannot do without; throws UnsupportedError naming it.
std::vector<Dim> required_known(const InferContext& context, size_t index, std::string_view name);
// The same, plain integers only.
std::vector<int64_t> required_ints(const InferContext& context, size_t index,
                                   std::string_view name);
// The one element of a scalar or of a tensor of one element.
int64_t required_int(const InferContext& context, size_t index, std::string_view name);

// Throws ShapeError naming input `index` unless its shape is `wanted`, extents compared where both
// are known: when a graph is planned all are. Kernels rely on what inference has checked: an
// operand that no other shape follows from needs this.
void check_input_shape(const InferContext& context, size_t index, const Shape& wanted);

// Every axis to [0, rank), order kept; throws ShapeError when one is out of range or stands twice.
std::vector<int64_t> normalize_axes(const std::vector<int64_t>& axes, size_t rank);
// The axes of a reducing operator: absent or empty means all of them.
std::vector<int64_t> normalize_axes_or_all(const std::optional<std::vector<int64_t>>& axes,
                                           size_t rank);
// Those of any other operator: absent means all of them.
std::vector<int64_t> given_axes_or_all(const std::optional<std::vector<int64_t>>& axes,
                                       size_t rank);

// The extent of two that must be equal when it runs; throws ShapeError if they cannot be.
Dim same_extent(const Dim& a, const Dim& b);
// a + b and a * b on constants throw ShapeError on overflow.
Dim checked_add(const Dim& a, const Dim& b);
Dim checked_mul(const Dim& a, const Dim& b);
// Product of extents, overflow checked where they are constant.
Dim checked_product(const Shape& shape);

// Integer contents of a value of the graph, when they are plain integers.
std::optional<std::vector<int64_t>> value_ints(const Graph& graph, ValueId id);
// int64[axes.size()] with the extents of `a` at `axes`; a constant when they are constant.
ValueId extents_at(GraphBuilder& builder, ValueId a, const std::vector<int64_t>& axes);
// Joins one-dimensional int64 values; a constant when all contents are known.
ValueId concat_ints(GraphBuilder& builder, const std::vector<ValueId>& parts);

}  // namespace ortrain
