// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"
#include "ortrain/ops/layer_norm/norm_shapes.h"

namespace ortrain::ops {
namespace {

void infer_rms_norm(InferContext& context) {
  const Shape& x = context.shape(0);
  const size_t axis = normalized_axis(context.attrs(), x);
  if (context.has_input(1)) check_normalized_shape(context.shape(1), x, axis, "scale");
  context.set_output(0, context.dtype(0), x);
}

// The statistic is recomputed: one more pass over x is cheaper than keeping it.
void rms_norm_gradient(GradContext& g) {
  const auto grads = g.GraphBuilder::node(
      kOrtrainDomain, "RMSNormalizationGrad", {g.output_grad(0), g.input(0), g.input(1)},
      {{"axis", g.attrs().int_("axis")}, {"epsilon", g.attrs().float_("epsilon")}},
      {g.needs_grad(0), g.needs_grad(1)});
  for (size_t i = 0; i < grads.size(); ++i) {
    if (g.needs_grad(i)) g.set_input_grad(i, grads[i]);
  }
}

void infer_rms_norm_grad(InferContext& context) {
  const Shape& x = context.shape(1);
  const size_t axis = normalized_axis(context.attrs(), x);
  check_input_shape(context, 0, x);
  if (context.has_input(2)) check_normalized_shape(context.shape(2), x, axis, "scale");
  context.set_output(0, context.dtype(0), x);
  context.set_output(1, context.dtype(0),
                     context.has_input(2) ? context.shape(2)
                                          : Shape(x.begin() + static_cast<int64_t>(axis), x.end()));
}

}  // namespace

void register_rms_norm(OpRegistry& registry) {
  registry.add(
      {.name = "RMSNormalization",
       .since = 23,
       .summary = "x / sqrt(mean(x^2) + epsilon) * scale over the dimensions from axis on.",
       .inputs = {{"X", "T"}, {"scale", "T", Arity::optional}},
       .outputs = {{"Y", "T"}},
       .attrs = {{"axis", int64_t{-1}}, {"epsilon", 1e-5}, {"stash_type", int64_t{1}}},
       .types = {{"T", kFloatTypes}},
       .precision = Precision::deny,
       .infer = infer_rms_norm,
       .gradient = rms_norm_gradient,
       .row_operand = 0});
  registry.add({.name = "RMSNormalizationGrad",
                .domain = std::string(kOrtrainDomain),
                .summary =
                    "With g = dy scale, r = 1 / sqrt(mean(x^2) + epsilon), h = x r: dx = r (g "
                    "- h mean(g h)), dscale = sum(dy h).",
                .inputs = {{"dy", "T"}, {"x", "T"}, {"scale", "T", Arity::optional}},
                .outputs = {{"dx", "T", Arity::optional}, {"dscale", "T", Arity::optional}},
                .attrs = {{"axis", int64_t{-1}}, {"epsilon", 1e-5}},
                .types = {{"T", kFloatTypes}},
                .infer = infer_rms_norm_grad});
}

}  // namespace ortrain::ops
