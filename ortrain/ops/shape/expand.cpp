// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

void check_extents(const std::vector<Dim>& extents, std::string_view name) {
  for (const Dim& extent : extents) {
    if (extent.is_constant() && extent.constant() < 0) {
      throw ShapeError(str("input '", name, "' holds a negative value: ", shape_str(extents)));
    }
  }
}

void infer_expand(InferContext& context) {
  const std::vector<Dim> target = required_known(context, 1, "shape");
  check_extents(target, "shape");
  Shape shape = broadcast(context.shape(0), target);
  checked_product(shape);
  // A known scalar or single element repeated stays known.
  std::optional<std::vector<Dim>> known;
  if (context.known(0) && shape.size() <= 1) {
    const Dim count = shape.empty() ? Dim(1) : shape[0];
    if (context.known(0)->size() == 1 && count.is_constant() && count.constant() <= 64) {
      known.emplace(static_cast<size_t>(count.constant()), context.known(0)->front());
    } else if (context.shape(0) == shape) {
      known = context.known(0);
    }
  }
  context.set_output(0, context.dtype(0), std::move(shape));
  if (known) context.set_known(0, std::move(*known));
}

void expand_gradient(GradContext& g) {
  if (g.needs_grad(0)) g.set_input_grad(0, g.reduce_to_shape_of(g.output_grad(0), g.input(0)));
}

void infer_tile(InferContext& context) {
  const std::vector<Dim> repeats = required_known(context, 1, "repeats");
  check_extents(repeats, "repeats");
  Shape shape = context.shape(0);
  if (repeats.size() != shape.size()) {
    throw ShapeError(str("input 'repeats' has ", repeats.size(), " elements, the input has the ",
                         "shape ", shape_str(shape)));
  }
  for (size_t i = 0; i < shape.size(); ++i) shape[i] = checked_mul(shape[i], repeats[i]);
  checked_product(shape);
  context.set_output(0, context.dtype(0), std::move(shape));
}

// With axes [r0, d0, r1, d1, ...] the repeats are every other axis, which are summed.
void tile_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  const ValueId repeats = g.input(1);
  std::vector<ValueId> extents;
  std::vector<int64_t> repeat_axes;
  for (int64_t axis = 0; axis < g.rank(g.input(0)); ++axis) {
    const std::optional<std::vector<int64_t>> known = value_ints(g.graph(), repeats);
    extents.push_back(known ? g.int64s({(*known)[static_cast<size_t>(axis)]})
                            : g.op("Gather", {repeats, g.int64s({axis})}));
    extents.push_back(extents_at(g, g.input(0), {axis}));
    repeat_axes.push_back(2 * axis);
  }
  if (extents.empty()) return g.set_input_grad(0, g.output_grad(0));
  const ValueId split = g.reshape(g.output_grad(0), concat_ints(g, extents));
  g.set_input_grad(0, g.reshape_like(g.reduce_sum(split, repeat_axes, false), g.input(0)));
}

void infer_sum_to_shape(InferContext& context) {
  const Shape target = required_known(context, 1, "shape");
  check_extents(target, "shape");
  const Shape& from = context.shape(0);
  bool fits = target.size() <= from.size();
  for (size_t i = 0; fits && i < target.size(); ++i) {
    const Dim& wide = from[from.size() - target.size() + i];
    const Dim& narrow = target[i];
    fits = narrow.is(1) || !narrow.is_constant() || !wide.is_constant() || narrow == wide;
  }
  if (!fits) {
    throw ShapeError(str("shape ", shape_str(from), " is no broadcast of ", shape_str(target)));
  }
  context.set_output(0, context.dtype(0), target);
}

void sum_to_shape_gradient(GradContext& g) {
  if (g.needs_grad(0)) g.set_input_grad(0, g.expand_like(g.output_grad(0), g.input(0)));
}

}  // namespace

void register_expand(OpRegistry& registry);
void register_expand(OpRegistry& registry) {
  registry.add({.name = "Expand",
                .since = 8,
                .summary = "Repeats a tensor by NumPy broadcasting with a shape.",
                .inputs = {{"input", "T"}, {"shape", "int64"}},
                .outputs = {{"output", "T"}},
                .types = {{"T", kAllTypes}},
                .infer = infer_expand,
                .gradient = expand_gradient});
  registry.add({.name = "Tile",
                .since = 6,
                .summary = "Repeats a tensor along each axis.",
                .inputs = {{"input", "T"}, {"repeats", "int64"}},
                .outputs = {{"output", "T"}},
                .types = {{"T", kAllTypes}},
                .infer = infer_tile,
                .gradient = tile_gradient});
  registry.add({.name = "SumToShape",
                .domain = std::string(kOrtrainDomain),
                .summary = "Sums x over the axes that broadcasting `shape` to the shape of x "
                           "repeats; the result has that shape.",
                .inputs = {{"x", "T"}, {"shape", "int64"}},
                .outputs = {{"y", "T"}},
                .types = {{"T", kNumericTypes}},
                .infer = infer_sum_to_shape,
                .gradient = sum_to_shape_gradient});
}

}  // namespace ortrain::ops
