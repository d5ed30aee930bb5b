// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"
#include "ortrain/ops/layer_norm/norm_shapes.h"

namespace ortrain::ops {
namespace {

Shape statistics_shape(Shape x, size_t axis) {
  for (size_t i = axis; i < x.size(); ++i) x[i] = Dim(1);
  return x;
}

void infer_layer_norm(InferContext& context) {
  const Shape& x = context.shape(0);
  const size_t axis = normalized_axis(context.attrs(), x);
  if (context.has_input(1)) check_normalized_shape(context.shape(1), x, axis, "Scale");
  if (context.has_input(2)) check_normalized_shape(context.shape(2), x, axis, "B");
  const Shape statistics = statistics_shape(x, axis);
  context.set_output(0, context.dtype(0), x);
  context.set_output(1, statistics_type(context.dtype(0)), statistics);
  context.set_output(2, statistics_type(context.dtype(0)), statistics);
}

void layer_norm_gradient(GradContext& g) {
  if (g.has_output_grad(1) || g.has_output_grad(2)) {
    throw UnsupportedError(
        str(Graph::context(g.node()), "gradients of Mean and InvStdDev are not supported"));
  }
  if (!g.has_output_grad(0)) return;
  const bool needs_bias = g.needs_grad(2);
  const auto grads = g.GraphBuilder::node(kOrtrainDomain, "LayerNormalizationGrad",
                                          {g.output_grad(0), g.input(0), g.output(1), g.output(2),
                                           g.input(1), needs_bias ? g.input(2) : kNoValue},
                                          {{"axis", g.attrs().int_("axis")}},
                                          {g.needs_grad(0), g.needs_grad(1), needs_bias});
  for (size_t i = 0; i < grads.size(); ++i) {
    if (g.needs_grad(i)) g.set_input_grad(i, grads[i]);
  }
}

void infer_layer_norm_grad(InferContext& context) {
  const Shape& x = context.shape(1);
  const size_t axis = normalized_axis(context.attrs(), x);
  const DType type = context.dtype(0);
  if (context.dtype(2) != statistics_type(type) || context.dtype(3) != statistics_type(type)) {
    throw DTypeError(str("'mean' and 'inv_std' must be ", name_of(statistics_type(type))));
  }
  check_input_shape(context, 0, x);
  for (const size_t i : {2, 3}) check_input_shape(context, i, statistics_shape(x, axis));
  if (context.has_input(4)) check_normalized_shape(context.shape(4), x, axis, "scale");
  if (context.has_input(5)) check_normalized_shape(context.shape(5), x, axis, "bias");
  const Shape normalized(x.begin() + static_cast<int64_t>(axis), x.end());
  context.set_output(0, type, x);
  context.set_output(1, type, context.has_input(4) ? context.shape(4) : normalized);
  context.set_output(2, type, context.has_input(5) ? context.shape(5) : normalized);
}

}  // namespace

void register_layer_norm(OpRegistry& registry) {
  registry.add(
      {.name = "LayerNormalization",
       .since = 17,
       .summary = "(x - mean) / sqrt(var + epsilon) * Scale + B over the dimensions from axis on; "
                  "statistics are float32, float64 for float64.",
       .inputs = {{"X", "T"}, {"Scale", "T", Arity::optional}, {"B", "T", Arity::optional}},
       .outputs = {{"Y", "T"}, {"Mean", "U", Arity::optional}, {"InvStdDev", "U", Arity::optional}},
       .attrs = {{"axis", int64_t{-1}}, {"epsilon", 1e-5}, {"stash_type", int64_t{1}}},
       .types = {{"T", kFloatTypes}, {"U", kFullFloatTypes}},
       .precision = Precision::deny,
       .infer = infer_layer_norm,
       .gradient = layer_norm_gradient,
       .row_operand = 0});
  registry.add({.name = "LayerNormalizationGrad",
                .domain = std::string(kOrtrainDomain),
                .summary =
                    "With g = dy scale and h = (x - mean) inv_std: dx = inv_std (g - mean(g) "
                    "- h mean(g h)), dscale = sum(dy h), dbias = sum(dy).",
                .inputs = {{"dy", "T"},
                           {"x", "T"},
                           {"mean", "U"},
                           {"inv_std", "U"},
                           {"scale", "T", Arity::optional},
                           {"bias", "T", Arity::optional}},
                .outputs = {{"dx", "T", Arity::optional},
                            {"dscale", "T", Arity::optional},
                            {"dbias", "T", Arity::optional}},
                .attrs = {{"axis", int64_t{-1}}},
                .types = {{"T", kFloatTypes}, {"U", kFullFloatTypes}},
                .infer = infer_layer_norm_grad});
}

}  // namespace ortrain::ops
