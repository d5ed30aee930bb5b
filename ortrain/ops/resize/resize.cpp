// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <optional>
#include <utility>

#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ops/resize/resize_axes.h"

namespace ortrain::ops {
namespace {

// Empty tensors stand for absent ones.
bool given(const InferContext& context, size_t index) {
  return context.has_input(index) && !(context.rank(index) == 1 && context.shape(index)[0].is(0));
}

std::vector<double> constant_floats(const InferContext& context, size_t index, const char* name) {
  const TensorData& data = context.constant(index);
  if (!data.defined()) {
    throw UnsupportedError(str(name, " must be a constant, so that the shape is known"));
  }
  const float* values = data.data_as<float>();
  return std::vector<double>(values, values + data.numel());
}

// floor(in * scale) for a symbol: exact for multiples of 1/64, otherwise an opaque symbol.
Dim scaled(const Dim& in, double scale) {
  const double parts = scale * 64;
  if (parts == std::floor(parts) && parts < 1e15) {
    return floor_div(in * Dim(static_cast<int64_t>(parts)), Dim(64));
  }
  return Dim::symbol(str("floor(", in.str(), " * ", scale, ")"));
}

Shape shape_by_scales(const InferContext& context, const Shape& x, size_t index) {
  const std::vector<int64_t> axes = resize_axes(context.attrs(), x.size());
  const std::vector<double> scales = constant_floats(context, index, "scales");
  if (is_constant(x)) return to_shape(resized_by_scales(to_dims(x), axes, scales));
  // Checks the scales; extents of 1 stand in for the symbols.
  resized_by_scales(Dims(x.size(), 1), axes, scales);
  Shape y = x;
  for (size_t i = 0; i < axes.size(); ++i) {
    Dim& extent = y[static_cast<size_t>(axes[i])];
    extent = scaled(extent, scales[i]);
  }
  return y;
}

Shape shape_by_sizes(const InferContext& context, const Shape& x, size_t index) {
  const std::vector<int64_t> axes = resize_axes(context.attrs(), x.size());
  const std::optional<std::vector<Dim>>& sizes = context.known(index);
  if (!sizes) throw UnsupportedError("the contents of sizes must be known when the plan is made");
  if (is_constant(x) && is_constant(*sizes)) {
    return to_shape(resized_to_sizes(context.attrs(), to_dims(x), axes, to_dims(*sizes)));
  }
  if (sizes->size() != axes.size()) {
    throw ShapeError(str("sizes has ", sizes->size(), " entries; ", axes.size(), " are needed"));
  }
  const bool stretches = context.attrs().string_("keep_aspect_ratio_policy") == "stretch";
  Shape y = x;
  for (size_t i = 0; i < axes.size(); ++i) {
    Dim& extent = y[static_cast<size_t>(axes[i])];
    extent = stretches ? (*sizes)[i]
                       : Dim::symbol(str("resize(", extent.str(), ", ", (*sizes)[i].str(), ")"));
  }
  return y;
}

// roi, scales and sizes are the inputs `first`, `first` + 1 and `first` + 2.
Shape resized_shape(const InferContext& context, const Shape& x, size_t first) {
  const bool by_scales = given(context, first + 1), by_sizes = given(context, first + 2);
  if (by_scales == by_sizes) throw InvalidModelError("exactly one of scales and sizes is needed");
  if (context.attrs().string_("coordinate_transformation_mode") == "tf_crop_and_resize") {
    if (!given(context, first)) throw InvalidModelError("tf_crop_and_resize needs a roi");
    constant_floats(context, first, "roi");
  }
  return by_scales ? shape_by_scales(context, x, first + 1) : shape_by_sizes(context, x, first + 2);
}

void infer_resize(InferContext& context) {
  context.set_output(0, context.dtype(0), resized_shape(context, context.shape(0), 1));
}

void infer_resize_grad(InferContext& context) {
  if (!context.known(1)) {
    throw UnsupportedError("the contents of x_shape must be known when the plan is made");
  }
  const Shape x = *context.known(1);
  const Shape y = resized_shape(context, x, 2);
  const Shape& dy = context.shape(0);
  bool fits = dy.size() == y.size();
  for (size_t i = 0; fits && i < y.size(); ++i) {
    fits = dy[i] == y[i] || !dy[i].is_constant() || !y[i].is_constant();
  }
  if (!fits) throw ShapeError(str("dy is ", shape_str(dy), "; Resize gives ", shape_str(y)));
  context.set_output(0, context.dtype(0), x);
}

void resize_gradient(GradContext& g) {
  const Attributes attributes = g.node().attributes;
  g.set_input_grad(
      0, g.own("ResizeGrad",
               {g.output_grad(0), g.shape_of(g.input(0)), g.input(1), g.input(2), g.input(3)},
               attributes));
}

// Resize is linear in X but for the extrapolation value.
void resize_grad_gradient(GradContext& g) {
  Attributes attributes = g.node().attributes;
  attributes["extrapolation_value"] = 0.0;
  const ValueId ddy =
      g.op("Resize", {g.output_grad(0), g.input(2), g.input(3), g.input(4)}, std::move(attributes));
  g.set_input_grad(0, g.reshape_like(ddy, g.input(0)));
}

std::vector<FormalAttribute> resize_attributes() {
  return {
      {"antialias", int64_t{0}},
      {"axes", AttributeKind::ints},
      {"coordinate_transformation_mode", std::string("half_pixel")},
      {"cubic_coeff_a", -0.75},
      {"exclude_outside", int64_t{0}},
      {"extrapolation_value", 0.0},
      {"keep_aspect_ratio_policy", std::string("stretch")},
      {"mode", std::string("nearest")},
      {"nearest_mode", std::string("round_prefer_floor")},
  };
}

}  // namespace

void register_resize(OpRegistry& registry) {
  registry.add({.name = "Resize",
                .domain = "",
                .since = 18,
                .summary = "Interpolates along the axes whose extent changes: nearest, linear or "
                           "cubic.",
                .inputs = {{"X", "T"},
                           {"roi", "float32", Arity::optional},
                           {"scales", "float32", Arity::optional},
                           {"sizes", "int64", Arity::optional}},
                .outputs = {{"Y", "T"}},
                .attrs = resize_attributes(),
                .types = {{"T", kFloatTypes}},
                .infer = infer_resize,
                .gradient = resize_gradient});
  registry.add({.name = "ResizeGrad",
                .domain = std::string(kOrtrainDomain),
                .summary = "dx of Y = Resize(X): each input gathers dy with the weights it had.",
                .inputs = {{"dy", "T"},
                           {"x_shape", "int64"},
                           {"roi", "float32", Arity::optional},
                           {"scales", "float32", Arity::optional},
                           {"sizes", "int64", Arity::optional}},
                .outputs = {{"dx", "T"}},
                .attrs = resize_attributes(),
                .types = {{"T", kFloatTypes}},
                .infer = infer_resize_grad,
                .gradient = resize_grad_gradient});
}

}  // namespace ortrain::ops
