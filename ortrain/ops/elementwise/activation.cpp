// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/elementwise/elementwise_def.h"

namespace ortrain::ops {
namespace {

// --- formulas

// max(x, 0) + log(1 + exp(-|x|))
ExprReg softplus(ExprEmitter& e, ExprReg x) {
  const ExprReg decay = e.unary(ExprOp::exp, e.unary(ExprOp::neg, e.unary(ExprOp::abs, x)));
  return e.add(e.unary(ExprOp::relu, x), e.unary(ExprOp::log1p, decay));
}

ExprReg negative(ExprEmitter& e, ExprReg x) { return e.lt(x, e.number(0.0)); }

ExprReg leaky_relu_expression(ExprEmitter& e) {
  const ExprReg x = e.input(0);
  return e.select(negative(e, x), e.mul(x, e.number(e.attrs().float_("alpha"))), x);
}

ExprReg elu_expression(ExprEmitter& e) {
  const ExprReg x = e.input(0);
  const ExprReg tail = e.mul(e.unary(ExprOp::expm1, x), e.number(e.attrs().float_("alpha")));
  return e.select(negative(e, x), tail, x);
}

ExprReg selu_expression(ExprEmitter& e) {
  return e.mul(elu_expression(e), e.number(e.attrs().float_("gamma")));
}

ExprReg celu_expression(ExprEmitter& e) {
  const ExprReg x = e.input(0);
  const ExprReg alpha = e.number(e.attrs().float_("alpha"));
  return e.select(negative(e, x), e.mul(e.unary(ExprOp::expm1, e.div(x, alpha)), alpha), x);
}

ExprReg softsign_expression(ExprEmitter& e) {
  const ExprReg x = e.input(0);
  return e.div(x, e.add(e.unary(ExprOp::abs, x), e.number(1.0)));
}

// clamp(alpha x + beta, 0, 1)
ExprReg hard_sigmoid(ExprEmitter& e, double alpha, double beta) {
  const ExprReg line = e.add(e.mul(e.input(0), e.number(alpha)), e.number(beta));
  return e.min(e.max(line, e.number(0.0)), e.number(1.0));
}

ExprReg hard_sigmoid_expression(ExprEmitter& e) {
  return hard_sigmoid(e, e.attrs().float_("alpha"), e.attrs().float_("beta"));
}

ExprReg hard_swish_expression(ExprEmitter& e) {
  return e.mul(e.input(0), hard_sigmoid(e, 1.0 / 6.0, 0.5));
}

ExprReg mish_expression(ExprEmitter& e) {
  return e.mul(e.input(0), e.unary(ExprOp::tanh, softplus(e, e.input(0))));
}

// --- gradients

ValueId zero_like_scalar(GradContext& g) { return g.scalar(g.dtype(g.input(0)), 0.0); }

// Where two pieces meet, PyTorch takes the slope of the one below 0.
ValueId is_positive(GradContext& g) {
  return g.op("Greater", {g.input(0), zero_like_scalar(g)});
}
ValueId is_not_positive(GradContext& g) {
  return g.op("LessOrEqual", {g.input(0), zero_like_scalar(g)});
}

void relu_gradient(GradContext& g) {
  const ValueId zero = zero_like_scalar(g);
  g.set_input_grad(0, g.where(g.op("Greater", {g.output(0), zero}), g.output_grad(0), zero));
}

void tanh_gradient(GradContext& g) {
  const ValueId y = g.output(0);
  const ValueId one = g.scalar(g.dtype(y), 1.0);
  g.set_input_grad(0, g.mul(g.output_grad(0), g.sub(one, g.mul(y, y))));
}

void sigmoid_gradient(GradContext& g) {
  const ValueId y = g.output(0);
  const ValueId one = g.scalar(g.dtype(y), 1.0);
  g.set_input_grad(0, g.mul(g.output_grad(0), g.mul(y, g.sub(one, y))));
}

void leaky_relu_gradient(GradContext& g) {
  const ValueId dy = g.output_grad(0);
  const ValueId tail = g.mul(dy, g.attrs().float_("alpha"));
  g.set_input_grad(0, g.where(is_positive(g), dy, tail));
}

// x <= 0: scale exp(x)
void exponential_tail_gradient(GradContext& g, ValueId exponent, double tail_scale,
                               double line_scale) {
  const ValueId dy = g.output_grad(0);
  const ValueId tail = g.mul(g.mul(dy, tail_scale), g.unary("Exp", exponent));
  const ValueId line = line_scale == 1.0 ? dy : g.mul(dy, line_scale);
  g.set_input_grad(0, g.where(is_not_positive(g), tail, line));
}

void elu_gradient(GradContext& g) {
  exponential_tail_gradient(g, g.input(0), g.attrs().float_("alpha"), 1.0);
}

void selu_gradient(GradContext& g) {
  const double gamma = g.attrs().float_("gamma");
  exponential_tail_gradient(g, g.input(0), gamma * g.attrs().float_("alpha"), gamma);
}

void celu_gradient(GradContext& g) {
  exponential_tail_gradient(g, g.div(g.input(0), g.attrs().float_("alpha")), 1.0, 1.0);
}

void softplus_gradient(GradContext& g) {
  g.set_input_grad(0, g.mul(g.output_grad(0), g.unary("Sigmoid", g.input(0))));
}

// 1 / (1 + |x|)^2
void softsign_gradient(GradContext& g) {
  const ValueId denominator = g.add(g.unary("Abs", g.input(0)), 1.0);
  g.set_input_grad(0, g.div(g.output_grad(0), g.mul(denominator, denominator)));
}

// alpha where 0 < y < 1
void hard_sigmoid_gradient(GradContext& g) {
  const ValueId y = g.output(0);
  const ValueId zero = zero_like_scalar(g);
  const ValueId one = g.scalar(g.dtype(y), 1.0);
  const ValueId inside = g.op("And", {g.op("Greater", {y, zero}), g.op("Less", {y, one})});
  const ValueId slope = g.mul(g.output_grad(0), g.attrs().float_("alpha"));
  g.set_input_grad(0, g.where(inside, slope, zero));
}

// 0 up to -3, 1 from 3 on, x / 3 + 1/2 in between
void hard_swish_gradient(GradContext& g) {
  const ValueId x = g.input(0);
  const ValueId three = g.scalar(g.dtype(x), 3.0);
  const ValueId low = g.op("LessOrEqual", {x, g.scalar(g.dtype(x), -3.0)});
  const ValueId high = g.op("GreaterOrEqual", {x, three});
  const ValueId middle = g.add(g.div(x, 3.0), 0.5);
  const ValueId slope =
      g.where(low, zero_like_scalar(g), g.where(high, g.scalar(g.dtype(x), 1.0), middle));
  g.set_input_grad(0, g.mul(g.output_grad(0), slope));
}

// t + x (1 - t^2) sigmoid(x), t = tanh(softplus(x))
void mish_gradient(GradContext& g) {
  const ValueId x = g.input(0);
  const ValueId t = g.unary("Tanh", g.unary("Softplus", x));
  const ValueId one = g.scalar(g.dtype(x), 1.0);
  const ValueId bend = g.mul(g.mul(x, g.unary("Sigmoid", x)), g.sub(one, g.mul(t, t)));
  g.set_input_grad(0, g.mul(g.output_grad(0), g.add(t, bend)));
}

}  // namespace

void register_activation(OpRegistry& registry) {
  registry.add(unary_def("Relu", 6, "max(X, 0).", kFloatTypes | kSignedIntegerTypes, ExprOp::relu,
                         relu_gradient));
  registry.add(
      unary_def("Tanh", 6, "Hyperbolic tangent.", kFloatTypes, ExprOp::tanh, tanh_gradient));
  registry.add(unary_def("Sigmoid", 6, "1 / (1 + exp(-X)).", kFloatTypes, ExprOp::sigmoid,
                         sigmoid_gradient));

  const auto add = [&](const char* name, int since, const char* summary, Expression expression,
                       Gradient gradient, std::vector<FormalAttribute> attrs = {}) {
    OpDef def =
        unary_def(name, since, summary, kFloatTypes, std::move(expression), std::move(gradient));
    def.attrs = std::move(attrs);
    registry.add(std::move(def));
  };
  add("LeakyRelu", 6, "X, times alpha where X is negative.", leaky_relu_expression,
      leaky_relu_gradient, {{"alpha", 0.01}});
  add("Elu", 6, "X, alpha (exp(X) - 1) where X is negative.", elu_expression, elu_gradient,
      {{"alpha", 1.0}});
  add("Selu", 6, "gamma times Elu.", selu_expression, selu_gradient,
      {{"alpha", 1.67326319217681884765625}, {"gamma", 1.05070102214813232421875}});
  add("Celu", 12, "X, alpha (exp(X / alpha) - 1) where X is negative.", celu_expression,
      celu_gradient, {{"alpha", 1.0}});
  registry.add(denied(unary_def(
      "Softplus", 1, "log(1 + exp(X)).", kFloatTypes,
      [](ExprEmitter& e) { return softplus(e, e.input(0)); }, softplus_gradient)));
  add("Softsign", 1, "X / (1 + |X|).", softsign_expression, softsign_gradient);
  add("HardSigmoid", 6, "alpha X + beta, cut to [0, 1].", hard_sigmoid_expression,
      hard_sigmoid_gradient, {{"alpha", 0.2}, {"beta", 0.5}});
  add("HardSwish", 14, "X times (X / 6 + 1/2, cut to [0, 1]).", hard_swish_expression,
      hard_swish_gradient);
  add("Mish", 18, "X tanh(softplus(X)).", mish_expression, mish_gradient);
}

}  // namespace ortrain::ops
