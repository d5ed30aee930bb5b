// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <numbers>

#include "ortrain/ops/elementwise/elementwise_def.h"

namespace ortrain::ops {
namespace {

// Above this, log(2 x) is asinh(x) and acosh(x) to the last digit, and x * x may overflow.
constexpr double kLarge = 1e9;

ExprReg log_of_twice(ExprEmitter& e, ExprReg x) {
  return e.add(e.unary(ExprOp::log, x), e.number(std::numbers::ln2));
}

// sign(x) log1p(a + a^2 / (1 + sqrt(a^2 + 1))), a = |x|: exact near 0, where log(x + sqrt(x^2 + 1))
// cancels.
ExprReg asinh_expression(ExprEmitter& e) {
  const ExprReg x = e.input(0);
  const ExprReg a = e.unary(ExprOp::abs, x);
  const ExprReg root = e.unary(ExprOp::sqrt, e.add(e.mul(a, a), e.number(1.0)));
  const ExprReg rest = e.div(e.mul(a, a), e.add(root, e.number(1.0)));
  const ExprReg near = e.unary(ExprOp::log1p, e.add(a, rest));
  const ExprReg size = e.select(e.lt(e.number(kLarge), a), log_of_twice(e, a), near);
  return e.mul(e.unary(ExprOp::sign, x), size);
}

// log1p(t + sqrt(t) sqrt(t + 2)), t = x - 1
ExprReg acosh_expression(ExprEmitter& e) {
  const ExprReg x = e.input(0);
  const ExprReg t = e.sub(x, e.number(1.0));
  const ExprReg root =
      e.mul(e.unary(ExprOp::sqrt, t), e.unary(ExprOp::sqrt, e.add(t, e.number(2.0))));
  const ExprReg near = e.unary(ExprOp::log1p, e.add(t, root));
  return e.select(e.lt(e.number(kLarge), x), log_of_twice(e, x), near);
}

// sign(x) log1p(2 a / (1 - a)) / 2, a = |x|
ExprReg atanh_expression(ExprEmitter& e) {
  const ExprReg x = e.input(0);
  const ExprReg a = e.unary(ExprOp::abs, x);
  const ExprReg ratio = e.div(e.add(a, a), e.sub(e.number(1.0), a));
  const ExprReg half = e.mul(e.unary(ExprOp::log1p, ratio), e.number(0.5));
  return e.mul(e.unary(ExprOp::sign, x), half);
}

// 1 / sqrt(x^2 + 1)
void asinh_gradient(GradContext& g) {
  const ValueId x = g.input(0);
  g.set_input_grad(0, g.div(g.output_grad(0), g.unary("Sqrt", g.add(g.mul(x, x), 1.0))));
}

// 1 / sqrt((x - 1) (x + 1)): below -1, where there is no result, a number that a mask may take away
void acosh_gradient(GradContext& g) {
  const ValueId x = g.input(0);
  const ValueId root = g.unary("Sqrt", g.mul(g.sub(x, 1.0), g.add(x, 1.0)));
  g.set_input_grad(0, g.div(g.output_grad(0), root));
}

// 1 / ((1 - x) (1 + x))
void atanh_gradient(GradContext& g) {
  const ValueId x = g.input(0);
  const ValueId one = g.scalar(g.dtype(x), 1.0);
  g.set_input_grad(0, g.div(g.output_grad(0), g.mul(g.sub(one, x), g.add(one, x))));
}

}  // namespace

void register_inverse_hyperbolic(OpRegistry& registry) {
  registry.add(unary_def("Asinh", 9, "Inverse hyperbolic sine.", kFloatTypes, asinh_expression,
                         asinh_gradient));
  registry.add(unary_def("Acosh", 9, "Inverse hyperbolic cosine.", kFloatTypes, acosh_expression,
                         acosh_gradient));
  registry.add(unary_def("Atanh", 9, "Inverse hyperbolic tangent.", kFloatTypes, atanh_expression,
                         atanh_gradient));
}

}  // namespace ortrain::ops
