// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <numeric>

#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/expr_program.h"
#include "ortrain/ir/flops.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ops/matmul/matmul_problem.h"

namespace ortrain::ops {
namespace {

void infer_linear(InferContext& context) {
  const Shape& x = context.shape(0);
  const Shape& weight = context.shape(1);
  if (x.empty() || weight.size() != 2) {
    throw ShapeError(str("needs x[..., K] and weight[N, K], has the shapes ", shape_str(x), " and ",
                         shape_str(weight)));
  }
  check_same_extent(x.back(), weight[1], "features of 'x' and 'weight'", x, weight);
  if (context.has_input(2)) {
    const Shape& bias = context.shape(2);
    if (bias.size() != 1) throw ShapeError(str("'bias' has the shape ", shape_str(bias)));
    check_same_extent(bias[0], weight[0], "outputs of 'bias' and 'weight'", bias, weight);
  }
  Shape y = x;
  y.back() = weight[0];
  context.set_output(0, context.dtype(0), std::move(y));
}

void linear_gradient(GradContext& g) {
  const ValueId dy = g.output_grad(0);
  if (g.needs_grad(0)) g.set_input_grad(0, g.own("LinearInputGrad", {dy, g.input(1)}));
  if (g.needs_grad(1)) g.set_input_grad(1, g.own("LinearWeightGrad", {dy, g.input(0)}));
  if (g.needs_grad(2)) {
    std::vector<int64_t> leading(static_cast<size_t>(g.rank(dy) - 1));
    std::iota(leading.begin(), leading.end(), 0);
    g.set_input_grad(2, leading.empty() ? dy : g.reduce_sum(dy, leading, false));
  }
}

void infer_weight_grad_as(InferContext& context, DType type) {
  const Shape& dy = context.shape(0);
  const Shape& x = context.shape(1);
  if (dy.empty() || dy.size() != x.size()) {
    throw ShapeError(str("needs dy[..., N] and x[..., K], has the shapes ", shape_str(dy), " and ",
                         shape_str(x)));
  }
  for (size_t i = 0; i + 1 < dy.size(); ++i) {
    check_same_extent(dy[i], x[i], "leading extents", dy, x);
  }
  const Shape result{dy.back(), x.back()};
  if (context.has_input(2)) {
    const Shape& base = context.shape(2);
    if (base.size() != 2) throw ShapeError(str("'base' has the shape ", shape_str(base)));
    check_same_extent(base[0], result[0], "rows of 'base' and dy^T x", base, result);
    check_same_extent(base[1], result[1], "columns of 'base' and dy^T x", base, result);
  }
  context.set_output(0, type, result);
}

void infer_weight_grad(InferContext& context) { infer_weight_grad_as(context, context.dtype(0)); }

void infer_wide_weight_grad(InferContext& context) {
  infer_weight_grad_as(context, expr_register_type(context.dtype(0)));
}

void infer_input_grad(InferContext& context) {
  const Shape& dy = context.shape(0);
  const Shape& weight = context.shape(1);
  if (dy.empty() || weight.size() != 2) {
    throw ShapeError(str("needs dy[..., N] and weight[N, K], has the shapes ", shape_str(dy),
                         " and ", shape_str(weight)));
  }
  check_same_extent(dy.back(), weight[0], "outputs of 'dy' and 'weight'", dy, weight);
  Shape dx = dy;
  dx.back() = weight[1];
  if (context.has_input(2)) {
    const Shape& base = context.shape(2);
    if (base.size() != dx.size()) throw ShapeError(str("'base' has the shape ", shape_str(base)));
    for (size_t i = 0; i < dx.size(); ++i) {
      check_same_extent(base[i], dx[i], "extents of 'base' and dy weight", base, dx);
    }
  }
  context.set_output(0, context.dtype(0), std::move(dx));
}

// dx = base + dy weight.
void input_grad_gradient(GradContext& g) {
  const ValueId dx = g.output_grad(0);
  if (g.needs_grad(0)) g.set_input_grad(0, g.own("Linear", {dx, g.input(1)}));
  if (g.needs_grad(1)) g.set_input_grad(1, g.own("LinearWeightGrad", {g.input(0), dx}));
  if (g.needs_grad(2)) g.set_input_grad(2, dx);
}

// dw = base + dy^T x.
void weight_grad_gradient(GradContext& g) {
  const ValueId dw = g.output_grad(0);
  if (g.needs_grad(0)) g.set_input_grad(0, g.own("Linear", {g.input(1), dw}));
  if (g.needs_grad(1)) g.set_input_grad(1, g.own("LinearInputGrad", {g.input(0), dw}));
  if (g.needs_grad(2)) g.set_input_grad(2, dw);
}

void wide_weight_grad_gradient(GradContext& g) {
  const ValueId dw = g.cast(g.output_grad(0), g.dtype(g.input(0)));
  if (g.needs_grad(0)) g.set_input_grad(0, g.own("Linear", {g.input(1), dw}));
  if (g.needs_grad(1)) g.set_input_grad(1, g.own("LinearInputGrad", {g.input(0), dw}));
}

std::vector<ValueId> linear_form(ExpandContext& e) {
  const ValueId y = e.op("MatMul", {e.input(0), e.transpose(e.input(1), {1, 0})});
  return {e.has_input(2) ? e.add(y, e.input(2)) : y};
}

}  // namespace

void register_linear(OpRegistry& registry) {
  registry.add({.name = "Linear",
                .domain = std::string(kOrtrainDomain),
                .summary = "x weight^T + bias over the last dimension: x[..., K], weight[N, K], "
                           "bias[N] to y[..., N].",
                .inputs = {{"x", "T"}, {"weight", "T"}, {"bias", "T", Arity::optional}},
                .outputs = {{"y", "T"}},
                .types = {{"T", kFloatTypes}},
                .precision = Precision::allow,
                .infer = infer_linear,
                .gradient = linear_gradient,
                .row_operand = 0,
                .flops = [](const NodeSpec& s) { return product_flops(s); },
                .standard_form = linear_form});
  registry.add({.name = "LinearInputGrad",
                .domain = std::string(kOrtrainDomain),
                .summary = "base + dy weight over the last dimension: dy[..., N], weight[N, K] to "
                           "dx[..., K].",
                .inputs = {{"dy", "T"}, {"weight", "T"}, {"base", "T", Arity::optional}},
                .outputs = {{"dx", "T"}},
                .types = {{"T", kFloatTypes}},
                .infer = infer_input_grad,
                .gradient = input_grad_gradient,
                .flops = [](const NodeSpec& s) { return product_flops(s); }});
  registry.add({.name = "LinearWeightGrad",
                .domain = std::string(kOrtrainDomain),
                .summary =
                    "base + dy^T x summed over all leading dimensions: dy[..., N], x[..., K] "
                    "to dw[N, K].",
                .inputs = {{"dy", "T"}, {"x", "T"}, {"base", "T", Arity::optional}},
                .outputs = {{"dw", "T"}},
                .types = {{"T", kFloatTypes}},
                .infer = infer_weight_grad,
                .gradient = weight_grad_gradient,
                .flops = weight_grad_flops});
  registry.add({.name = "WideLinearWeightGrad",
                .domain = std::string(kOrtrainDomain),
                .summary = "dy^T x summed over all leading dimensions, as summed: dy[..., N], "
                           "x[..., K] to dw[N, K], in float32 for the 16-bit types, not rounded.",
                .inputs = {{"dy", "T"}, {"x", "T"}},
                .outputs = {{"dw", "T2"}},
                .types = {{"T", kFloatTypes}, {"T2", kFloatTypes}},
                .infer = infer_wide_weight_grad,
                .gradient = wide_weight_grad_gradient,
                .flops = weight_grad_flops});
}

}  // namespace ortrain::ops
