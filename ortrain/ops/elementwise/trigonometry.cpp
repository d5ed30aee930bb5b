// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/elementwise/elementwise_def.h"

namespace ortrain::ops {
namespace {

void sin_gradient(GradContext& g) {
  g.set_input_grad(0, g.mul(g.output_grad(0), g.unary("Cos", g.input(0))));
}

void cos_gradient(GradContext& g) {
  g.set_input_grad(0, g.neg(g.mul(g.output_grad(0), g.unary("Sin", g.input(0)))));
}

// 1 + tan(x)^2
void tan_gradient(GradContext& g) {
  const ValueId y = g.output(0);
  g.set_input_grad(0, g.mul(g.output_grad(0), g.add(g.mul(y, y), 1.0)));
}

// sqrt(1 - x^2), from the factors so that it is exact near the ends
ValueId semicircle(GradContext& g) {
  const ValueId x = g.input(0);
  const ValueId one = g.scalar(g.dtype(x), 1.0);
  return g.unary("Sqrt", g.mul(g.sub(one, x), g.add(one, x)));
}

void asin_gradient(GradContext& g) { g.set_input_grad(0, g.div(g.output_grad(0), semicircle(g))); }

void acos_gradient(GradContext& g) {
  g.set_input_grad(0, g.neg(g.div(g.output_grad(0), semicircle(g))));
}

// 1 / (1 + x^2)
void atan_gradient(GradContext& g) {
  const ValueId x = g.input(0);
  g.set_input_grad(0, g.div(g.output_grad(0), g.add(g.mul(x, x), 1.0)));
}

void sinh_gradient(GradContext& g) {
  g.set_input_grad(0, g.mul(g.output_grad(0), g.unary("Cosh", g.input(0))));
}

void cosh_gradient(GradContext& g) {
  g.set_input_grad(0, g.mul(g.output_grad(0), g.unary("Sinh", g.input(0))));
}

}  // namespace

void register_trigonometry(OpRegistry& registry) {
  const auto add = [&](const char* name, const char* summary, ExprOp op, Gradient gradient) {
    registry.add(unary_def(name, 7, summary, kFloatTypes, op, std::move(gradient)));
  };
  const auto add_denied = [&](const char* name, const char* summary, ExprOp op, Gradient gradient) {
    registry.add(denied(unary_def(name, 7, summary, kFloatTypes, op, std::move(gradient))));
  };
  add("Sin", "Sine.", ExprOp::sin, sin_gradient);
  add("Cos", "Cosine.", ExprOp::cos, cos_gradient);
  add_denied("Tan", "Tangent.", ExprOp::tan, tan_gradient);
  add_denied("Asin", "Inverse sine.", ExprOp::asin, asin_gradient);
  add_denied("Acos", "Inverse cosine.", ExprOp::acos, acos_gradient);
  add("Atan", "Inverse tangent.", ExprOp::atan, atan_gradient);
  add_denied("Sinh", "Hyperbolic sine.", ExprOp::sinh, sinh_gradient);
  add_denied("Cosh", "Hyperbolic cosine.", ExprOp::cosh, cosh_gradient);
}

}  // namespace ortrain::ops
