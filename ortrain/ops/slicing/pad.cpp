// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

// `shape` grown by pads = [begin of each axis..., end of each axis...].
Shape padded(const Shape& shape, const std::vector<Dim>& pads,
             const std::optional<std::vector<int64_t>>& axes, const std::string& mode) {
  if (mode != "constant" && mode != "reflect" && mode != "edge" && mode != "wrap") {
    throw InvalidModelError(str("mode '", mode, "' is none of constant, reflect, edge, wrap"));
  }
  const std::vector<int64_t> padded_axes = given_axes_or_all(axes, shape.size());
  const size_t count = padded_axes.size();
  if (pads.size() != 2 * count) {
    throw ShapeError(str("input 'pads' has ", pads.size(), " elements, expected two for each of ",
                         count, " axes"));
  }
  // No axis is that long; sums of these stay within int64.
  constexpr int64_t kMostPadding = int64_t{1} << 40;
  for (const Dim& pad : pads) {
    if (pad.is_constant() && (pad.constant() > kMostPadding || pad.constant() < -kMostPadding)) {
      throw ShapeError(str("input 'pads' has ", pad.str(), ", beyond ", kMostPadding));
    }
  }
  Shape result = shape;
  for (size_t i = 0; i < count; ++i) {
    const size_t axis = static_cast<size_t>(padded_axes[i]);
    result[axis] = checked_add(checked_add(shape[axis], pads[i]), pads[count + i]);
    const bool grows = !(result[axis].is(0) || (pads[i].is(0) && pads[count + i].is(0)));
    if (shape[axis].is(0) && grows && mode != "constant") {
      throw ShapeError(str("axis ", axis, " of shape ", shape_str(shape),
                           " is empty: there is nothing to pad it with in mode '", mode, "'"));
    }
  }
  checked_product(result);
  return result;
}

std::optional<std::vector<int64_t>> read_axes(const InferContext& context, size_t index) {
  if (!context.has_input(index)) return std::nullopt;
  return required_ints(context, index, "axes");
}

void infer_pad(InferContext& context) {
  if (context.has_input(2)) {
    const Dim elements = checked_product(context.shape(2));
    if (elements.is_constant() && !elements.is(1)) {
      throw ShapeError("input 'constant_value' must be a scalar");
    }
  }
  context.set_output(0, context.dtype(0),
                     padded(context.shape(0), required_known(context, 1, "pads"),
                            read_axes(context, 3), context.attrs().string_("mode")));
}

void pad_gradient(GradContext& g) {
  const ValueId dy = g.output_grad(0);
  if (g.attrs().string_("mode") != "constant") {
    if (!g.needs_grad(0)) return;
    return g.set_input_grad(0,
                            g.own("PadGrad", {dy, g.shape_of(g.input(0)), g.input(1), g.input(3)},
                                  {{"mode", g.attrs().string_("mode")}}));
  }
  // Padding by the negative amounts takes off what was put on.
  ValueId negative;
  if (const std::optional<std::vector<int64_t>> pads = value_ints(g.graph(), g.input(1))) {
    std::vector<int64_t> opposite;
    for (int64_t pad : *pads) opposite.push_back(-pad);
    negative = g.int64s(opposite);
  } else {
    negative = g.neg(g.input(1));
  }
  const ValueId dx = g.op("Pad", {dy, negative, kNoValue, g.input(3)});
  if (g.needs_grad(0)) g.set_input_grad(0, dx);
  if (g.needs_grad(2)) {
    const ValueId rest = g.sub(g.reduce_sum(dy, {}, false), g.reduce_sum(dx, {}, false));
    g.set_input_grad(2, g.reshape_like(rest, g.input(2)));
  }
}

void infer_pad_grad(InferContext& context) {
  const Shape shape = required_known(context, 1, "shape");
  const Shape expected = padded(shape, required_known(context, 2, "pads"), read_axes(context, 3),
                                context.attrs().string_("mode"));
  const Shape& dy = context.shape(0);
  bool fits = dy.size() == expected.size();
  for (size_t i = 0; fits && i < dy.size(); ++i) {
    fits = !dy[i].is_constant() || !expected[i].is_constant() || dy[i] == expected[i];
  }
  if (!fits) {
    throw ShapeError(
        str("the gradient has the shape ", shape_str(dy), ", expected ", shape_str(expected)));
  }
  context.set_output(0, context.dtype(0), shape);
}

void pad_grad_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  g.set_input_grad(0, g.op("Pad", {g.output_grad(0), g.input(2), kNoValue, g.input(3)},
                           {{"mode", g.attrs().string_("mode")}}));
}

}  // namespace

void register_pad(OpRegistry& registry);
void register_pad(OpRegistry& registry) {
  registry.add({.name = "Pad",
                .since = 11,
                .summary = "Grows (or, with negative pads, crops) axes at both ends.",
                .inputs = {{"data", "T"},
                           {"pads", "int64"},
                           {"constant_value", "T", Arity::optional},
                           {"axes", "Tind", Arity::optional}},
                .outputs = {{"output", "T"}},
                .attrs = {{"mode", std::string("constant")}},
                .types = {{"T", kAllTypes}, {"Tind", kIndexTypes}},
                .infer = infer_pad,
                .gradient = pad_gradient});
  registry.add({.name = "PadGrad",
                .domain = std::string(kOrtrainDomain),
                .summary = "Gradient of Pad in the modes reflect, edge and wrap: each element of a "
                           "tensor of `shape` gets the sum of dy over the places it was copied to.",
                .inputs = {{"dy", "T"},
                           {"shape", "int64"},
                           {"pads", "int64"},
                           {"axes", "Tind", Arity::optional}},
                .outputs = {{"dx", "T"}},
                .attrs = {{"mode", std::string("reflect")}},
                .types = {{"T", kFloatTypes}, {"Tind", kIndexTypes}},
                .infer = infer_pad_grad,
                .gradient = pad_grad_gradient});
}

}  // namespace ortrain::ops
