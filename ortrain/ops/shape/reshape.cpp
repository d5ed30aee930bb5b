// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

void set_reshaped(InferContext& context, Shape shape) {
  const bool keeps_contents = context.known(0) && shape.size() <= 1;
  context.set_output(0, context.dtype(0), std::move(shape));
  if (keeps_contents) context.set_known(0, *context.known(0));
}

// The extent that -1 stands for: elements of `from` over elements of `to` without position
// `inferred`. Extents that stand on both sides cancel first, so that symbols divide exactly and
// zeros do not make it ambiguous.
Dim solve_extent(const Shape& from, const Shape& to, size_t inferred) {
  Shape left = from;
  Dim divisor(1);
  for (size_t i = 0; i < to.size(); ++i) {
    if (i == inferred) continue;
    auto match = std::find(left.begin(), left.end(), to[i]);
    if (match != left.end()) {
      left.erase(match);
    } else {
      divisor = checked_mul(divisor, to[i]);
    }
  }
  const Dim total = checked_product(left);
  if (divisor.is(0)) {
    throw ShapeError(str("the extent -1 is ambiguous: ", shape_str(from),
                         " has no elements, nor has the rest of the target shape"));
  }
  if (total.is_constant() && divisor.is_constant() && total.constant() % divisor.constant() != 0) {
    throw ShapeError(str("a tensor of shape ", shape_str(from),
                         " cannot be split by the extents beside -1, whose product is ",
                         divisor.str()));
  }
  return floor_div(total, divisor);
}

constexpr int64_t kMostOpenExtents = 64;

void infer_reshape(InferContext& context) {
  const Shape& from = context.shape(0);
  if (context.rank(1) != 1) throw ShapeError("input 'shape' must have rank 1");
  const std::optional<std::vector<Dim>>& target = context.known(1);
  if (!target) {
    // Only the extents are open.
    const Dim& rank = context.shape(1)[0];
    if (!rank.is_constant()) {
      throw UnsupportedError("the number of elements of input 'shape' must be known");
    }
    if (rank.constant() > kMostOpenExtents) {
      throw UnsupportedError(str("a result of rank ", rank.constant(), " with open extents; up to ",
                                 kMostOpenExtents, " are supported"));
    }
    Shape shape;
    for (int64_t i = 0; i < rank.constant(); ++i) {
      shape.push_back(context.unknown_extent(0, static_cast<size_t>(i)));
    }
    return context.set_output(0, context.dtype(0), std::move(shape));
  }
  const bool zero_copies = context.attrs().int_("allowzero") == 0;
  Shape to = *target;
  std::optional<size_t> inferred;
  for (size_t i = 0; i < to.size(); ++i) {
    if (to[i].is(0) && zero_copies) {
      if (i >= from.size()) {
        throw ShapeError(str("target shape ", shape_str(*target), " copies axis ", i,
                             ", the input has the shape ", shape_str(from)));
      }
      to[i] = from[i];
    } else if (to[i].is(-1)) {
      if (inferred) {
        throw ShapeError(str("target shape ", shape_str(*target), " has more than one -1"));
      }
      inferred = i;
    } else if (to[i].is_constant() && to[i].constant() < 0) {
      throw ShapeError(str("target shape ", shape_str(*target), " has a negative extent"));
    }
  }
  if (inferred) to[*inferred] = solve_extent(from, to, *inferred);
  const Dim before = checked_product(from);
  const Dim after = checked_product(to);
  if (before.is_constant() && after.is_constant() && !(before == after)) {
    throw ShapeError(str("shape ", shape_str(from), " has ", before.str(),
                         " elements, target shape ", shape_str(to), " has ", after.str()));
  }
  set_reshaped(context, std::move(to));
}

void infer_flatten(InferContext& context) {
  const Shape& from = context.shape(0);
  const int64_t rank = context.rank(0);
  int64_t axis = context.attrs().int_("axis");
  if (axis < -rank || axis > rank) {
    throw ShapeError(str("axis ", axis, " is out of range for rank ", rank));
  }
  if (axis < 0) axis += rank;
  context.set_output(0, context.dtype(0),
                     {checked_product(Shape(from.begin(), from.begin() + axis)),
                      checked_product(Shape(from.begin() + axis, from.end()))});
}

void infer_squeeze(InferContext& context) {
  const Shape& from = context.shape(0);
  std::vector<bool> drop(from.size(), false);
  if (context.has_input(1)) {
    for (int64_t axis : normalize_axes(required_ints(context, 1, "axes"), from.size())) {
      const Dim& extent = from[static_cast<size_t>(axis)];
      if (extent.is_constant() && !extent.is(1)) {
        throw ShapeError(str("axis ", axis, " of shape ", shape_str(from), " is not 1"));
      }
      drop[static_cast<size_t>(axis)] = true;
    }
  } else {
    if (!is_constant(from)) {
      throw UnsupportedError(str("without input 'axes' the rank of the result is open: the input ",
                                 "has the shape ", shape_str(from)));
    }
    for (size_t i = 0; i < from.size(); ++i) drop[i] = from[i].is(1);
  }
  Shape to;
  for (size_t i = 0; i < from.size(); ++i) {
    if (!drop[i]) to.push_back(from[i]);
  }
  set_reshaped(context, std::move(to));
}

void infer_unsqueeze(InferContext& context) {
  const Shape& from = context.shape(0);
  const std::vector<int64_t> given = required_ints(context, 1, "axes");
  const size_t rank = from.size() + given.size();
  std::vector<bool> added(rank, false);
  for (int64_t axis : normalize_axes(given, rank)) added[static_cast<size_t>(axis)] = true;
  Shape to;
  size_t next = 0;
  for (size_t i = 0; i < rank; ++i) to.push_back(added[i] ? Dim(1) : from[next++]);
  set_reshaped(context, std::move(to));
}

void reshape_gradient(GradContext& g) {
  if (g.needs_grad(0)) g.set_input_grad(0, g.reshape_like(g.output_grad(0), g.input(0)));
}

}  // namespace

void register_reshape(OpRegistry& registry);
void register_reshape(OpRegistry& registry) {
  registry.add({.name = "Reshape",
                .since = 5,
                .summary = "The same elements in another shape; -1 stands for the open extent.",
                .inputs = {{"data", "T"}, {"shape", "int64"}},
                .outputs = {{"reshaped", "T"}},
                .attrs = {{"allowzero", int64_t{0}}},
                .types = {{"T", kAllTypes}},
                .infer = infer_reshape,
                .gradient = reshape_gradient});
  registry.add({.name = "Flatten",
                .since = 1,
                .summary = "Merges the axes before `axis`, and those from it on, into a matrix.",
                .inputs = {{"input", "T"}},
                .outputs = {{"output", "T"}},
                .attrs = {{"axis", int64_t{1}}},
                .types = {{"T", kAllTypes}},
                .infer = infer_flatten,
                .gradient = reshape_gradient});
  registry.add({.name = "Squeeze",
                .since = 13,
                .summary = "Drops axes of extent 1.",
                .inputs = {{"data", "T"}, {"axes", "int64", Arity::optional}},
                .outputs = {{"squeezed", "T"}},
                .types = {{"T", kAllTypes}},
                .infer = infer_squeeze,
                .gradient = reshape_gradient});
  registry.add({.name = "Unsqueeze",
                .since = 13,
                .summary = "Adds axes of extent 1.",
                .inputs = {{"data", "T"}, {"axes", "int64"}},
                .outputs = {{"expanded", "T"}},
                .types = {{"T", kAllTypes}},
                .infer = infer_unsqueeze,
                .gradient = reshape_gradient});
}

}  // namespace ortrain::ops
