// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

void infer_along_axis(InferContext& context) {
  // A scalar counts as one element along axis 0.
  const size_t rank = context.shape(0).empty() ? 1 : context.shape(0).size();
  normalize_axis(context.attrs().int_("axis"), rank);
  context.set_output(0, context.dtype(0), context.shape(0));
}

void infer_grad(InferContext& context) {
  infer_along_axis(context);
  check_input_shape(context, 1, context.shape(0));
}

void softmax_gradient(GradContext& g) {
  g.set_input_grad(
      0, g.own("SoftmaxGrad", {g.output_grad(0), g.output(0)}, {{"axis", g.attrs().int_("axis")}}));
}

void log_softmax_gradient(GradContext& g) {
  g.set_input_grad(0, g.own("LogSoftmaxGrad", {g.output_grad(0), g.output(0)},
                            {{"axis", g.attrs().int_("axis")}}));
}

// dx = y (dy - s), s = <dy, y>: d(dy) = y (u - <u, y>), d(y) = u (dy - s) - dy <u, y>.
void softmax_grad_gradient(GradContext& g) {
  const ValueId dy = g.input(0);
  const ValueId y = g.input(1);
  const ValueId u = g.output_grad(0);
  const int64_t axis = g.attrs().int_("axis");
  if (g.needs_grad(0)) {
    g.set_input_grad(0, g.own("SoftmaxGrad", {u, y}, {{"axis", axis}}));
  }
  if (g.needs_grad(1)) {
    auto sum = [&](ValueId v) { return g.rank(v) == 0 ? v : g.reduce_sum(v, {axis}, true); };
    const ValueId s = sum(g.mul(dy, y));
    const ValueId t = sum(g.mul(u, y));
    g.set_input_grad(1, g.sub(g.mul(u, g.sub(dy, s)), g.mul(dy, t)));
  }
}

// dx = dy - exp(y) sum(dy): d(dy) = u - sum(u exp(y)), d(y) = -u exp(y) sum(dy).
void log_softmax_grad_gradient(GradContext& g) {
  const ValueId dy = g.input(0);
  const ValueId p = g.unary("Exp", g.input(1));
  const ValueId u = g.output_grad(0);
  const int64_t axis = g.attrs().int_("axis");
  auto sum = [&](ValueId v) { return g.rank(v) == 0 ? v : g.reduce_sum(v, {axis}, true); };
  const ValueId up = g.mul(u, p);
  if (g.needs_grad(0)) g.set_input_grad(0, g.sub(u, sum(up)));
  if (g.needs_grad(1)) g.set_input_grad(1, g.neg(g.mul(up, sum(dy))));
}

}  // namespace

void register_softmax(OpRegistry& registry) {
  registry.add({.name = "Softmax",
                .since = 13,
                .summary = "exp(x - max) / sum(exp(x - max)) along one axis.",
                .inputs = {{"input", "T"}},
                .outputs = {{"output", "T"}},
                .attrs = {{"axis", int64_t{-1}}},
                .types = {{"T", kFloatTypes}},
                .precision = Precision::deny,
                .infer = infer_along_axis,
                .gradient = softmax_gradient,
                .row_operand = 0});
  registry.add({.name = "LogSoftmax",
                .since = 13,
                .summary = "x - max - log(sum(exp(x - max))) along one axis.",
                .inputs = {{"input", "T"}},
                .outputs = {{"output", "T"}},
                .attrs = {{"axis", int64_t{-1}}},
                .types = {{"T", kFloatTypes}},
                .precision = Precision::deny,
                .infer = infer_along_axis,
                .gradient = log_softmax_gradient,
                .row_operand = 0});
  registry.add({.name = "SoftmaxGrad",
                .domain = std::string(kOrtrainDomain),
                .summary = "y (dy - sum(dy y)) along one axis, y = softmax(x).",
                .inputs = {{"dy", "T"}, {"y", "T"}},
                .outputs = {{"dx", "T"}},
                .attrs = {{"axis", int64_t{-1}}},
                .types = {{"T", kFloatTypes}},
                .infer = infer_grad,
                .gradient = softmax_grad_gradient});
  registry.add({.name = "LogSoftmaxGrad",
                .domain = std::string(kOrtrainDomain),
                .summary = "dy - exp(y) sum(dy) along one axis, y = log_softmax(x).",
                .inputs = {{"dy", "T"}, {"y", "T"}},
                .outputs = {{"dx", "T"}},
                .attrs = {{"axis", int64_t{-1}}},
                .types = {{"T", kFloatTypes}},
                .infer = infer_grad,
                .gradient = log_softmax_grad_gradient});
}

}  // namespace ortrain::ops
