// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

// Checks x [N, C, ...] at input `x` and per-channel parameters at the inputs from `parameter` on.
void check_group_norm(const InferContext& context, size_t x, size_t parameter, size_t count) {
  const Shape& shape = context.shape(x);
  if (shape.size() < 2) {
    throw ShapeError(str("X needs the dimensions [N, C, ...], has the shape ", shape_str(shape)));
  }
  const int64_t groups = context.attrs().int_("num_groups");
  const Dim& channels = shape[1];
  if (groups < 1 || (channels.is_constant() && channels.constant() % groups != 0)) {
    throw ShapeError(str(channels.str(), " channels do not split into ", groups, " groups"));
  }
  for (size_t i = parameter; i < parameter + count; ++i) {
    if (!context.has_input(i)) continue;
    const Shape& p = context.shape(i);
    if (p.size() != 1 || (p[0] != channels && p[0].is_constant() && channels.is_constant())) {
      throw ShapeError(str("a parameter of shape ", shape_str(p), " does not fit ", channels.str(),
                           " channels"));
    }
  }
}

void infer_group_norm(InferContext& context) {
  check_group_norm(context, 0, 1, 2);
  context.set_output(0, context.dtype(0), context.shape(0));
}

// The statistics are recomputed: two more passes over x are cheaper than keeping a copy.
void group_norm_gradient(GradContext& g) {
  const std::vector<bool> wanted{g.needs_grad(0), g.needs_grad(1), g.needs_grad(2)};
  const auto grads = g.GraphBuilder::node(
      kOrtrainDomain, "GroupNormalizationGrad", {g.output_grad(0), g.input(0), g.input(1)},
      {{"num_groups", g.attrs().int_("num_groups")}, {"epsilon", g.attrs().float_("epsilon")}},
      wanted);
  for (size_t i = 0; i < grads.size(); ++i) {
    if (wanted[i]) g.set_input_grad(i, grads[i]);
  }
}

void infer_group_norm_grad(InferContext& context) {
  check_group_norm(context, 1, 2, 1);
  const Shape& x = context.shape(1);
  check_input_shape(context, 0, x);
  context.set_output(0, context.dtype(0), x);
  context.set_output(1, context.dtype(0), {x[1]});
  context.set_output(2, context.dtype(0), {x[1]});
}

}  // namespace

void register_group_norm(OpRegistry& registry) {
  registry.add(
      {.name = "GroupNormalization",
       .since = 21,
       .summary = "(x - mean) / sqrt(var + epsilon) over each group of channels, times scale "
                  "plus bias per channel.",
       .inputs = {{"X", "T"}, {"scale", "T", Arity::optional}, {"bias", "T", Arity::optional}},
       .outputs = {{"Y", "T"}},
       .attrs = {{"epsilon", 1e-5},
                 {"num_groups", AttributeKind::int_, true},
                 {"stash_type", int64_t{1}}},
       .types = {{"T", kFloatTypes}},
       .precision = Precision::deny,
       .infer = infer_group_norm,
       .gradient = group_norm_gradient});
  registry.add({.name = "GroupNormalizationGrad",
                .domain = std::string(kOrtrainDomain),
                .summary =
                    "With g = dy scale and h = (x - mean) inv_std: dx = inv_std (g - mean(g) - h "
                    "mean(g h)) per group, dscale = sum(dy h), dbias = sum(dy) per channel.",
                .inputs = {{"dy", "T"}, {"x", "T"}, {"scale", "T", Arity::optional}},
                .outputs = {{"dx", "T", Arity::optional},
                            {"dscale", "T", Arity::optional},
                            {"dbias", "T", Arity::optional}},
                .attrs = {{"epsilon", 1e-5}, {"num_groups", AttributeKind::int_, true}},
                .types = {{"T", kFloatTypes}},
                .infer = infer_group_norm_grad});
}

}  // namespace ortrain::ops
