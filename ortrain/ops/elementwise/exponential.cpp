// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <numbers>

#include "ortrain/ops/elementwise/elementwise_def.h"

namespace ortrain::ops {
namespace {

void exp_gradient(GradContext& g) { g.set_input_grad(0, g.mul(g.output_grad(0), g.output(0))); }

void log_gradient(GradContext& g) { g.set_input_grad(0, g.div(g.output_grad(0), g.input(0))); }

// 1 / (2 sqrt(x))
void sqrt_gradient(GradContext& g) {
  g.set_input_grad(0, g.div(g.mul(g.output_grad(0), 0.5), g.output(0)));
}

// -1 / x^2
void reciprocal_gradient(GradContext& g) {
  const ValueId y = g.output(0);
  g.set_input_grad(0, g.neg(g.mul(g.mul(g.output_grad(0), y), y)));
}

// 2 / sqrt(pi) exp(-x^2)
void erf_gradient(GradContext& g) {
  const ValueId x = g.input(0);
  const ValueId bell = g.unary("Exp", g.neg(g.mul(x, x)));
  g.set_input_grad(0, g.mul(g.mul(g.output_grad(0), 2.0 * std::numbers::inv_sqrtpi), bell));
}

std::optional<double> scalar_constant(const GradContext& g, size_t index) {
  const Value& value = g.value(g.input(index));
  if (value.kind != ValueKind::constant || value.constant.numel() != 1) return std::nullopt;
  return value.constant.to_double();
}

// b a^(b-1); zero where b is zero, also at a = 0.
ValueId base_gradient(GradContext& g, ValueId a, ValueId b) {
  const ValueId dy = g.output_grad(0);
  const std::optional<double> exponent = scalar_constant(g, 1);
  if (exponent == 2.0) return g.mul(g.mul(dy, 2.0), a);
  if (exponent && *exponent != 0.0) {
    const ValueId power = g.op("Pow", {a, g.scalar(g.dtype(a), *exponent - 1.0)});
    return g.mul(g.mul(dy, *exponent), power);
  }
  const ValueId zero = g.scalar(g.dtype(a), 0.0);
  const ValueId slope = g.mul(b, g.op("Pow", {a, g.sub(b, 1.0)}));
  return g.mul(dy, g.where(g.op("Equal", {b, zero}), zero, slope));
}

// a^b log(a); zero at a = 0 for b >= 0, where a^b log(a) would be 0 * -inf.
ValueId exponent_gradient(GradContext& g, ValueId a, ValueId b) {
  const ValueId zero = g.scalar(g.dtype(a), 0.0);
  const ValueId flat = g.op("And", {g.op("Equal", {a, zero}), g.op("GreaterOrEqual", {b, zero})});
  const ValueId slope = g.mul(g.output(0), g.unary("Log", a));
  return g.mul(g.output_grad(0), g.where(flat, zero, slope));
}

void pow_gradient(GradContext& g) {
  const ValueId a = g.input(0);
  const ValueId b = g.cast(g.input(1), g.dtype(a));
  if (g.needs_grad(0)) g.set_input_grad(0, g.reduce_to_shape_of(base_gradient(g, a, b), a));
  if (g.needs_grad(1)) {
    const ValueId gradient = g.cast(exponent_gradient(g, a, b), g.dtype(g.input(1)));
    g.set_input_grad(1, g.reduce_to_shape_of(gradient, g.input(1)));
  }
}

// The exponents of losses and norms cost a multiplication or a root.
ExprReg pow_by_constant(ExprEmitter& e, ExprReg a, double exponent) {
  if (exponent == 1.0) return a;
  if (exponent == 2.0) return e.mul(a, a);
  if (exponent == 3.0) return e.mul(e.mul(a, a), a);
  if (exponent == 4.0) return e.mul(e.mul(a, a), e.mul(a, a));
  if (exponent == 0.5) return e.unary(ExprOp::sqrt, a);
  if (exponent == -0.5) return e.unary(ExprOp::rsqrt, a);
  if (exponent == -1.0) return e.unary(ExprOp::reciprocal, a);
  return kNoExprReg;
}

ExprReg pow_expression(ExprEmitter& e) {
  const ExprReg a = e.input(0);
  const ExprReg b = e.input(1);
  const DType base = e.type(a);
  const DType exponent = e.type(b);
  if (is_float(base)) {
    const ExprReg simple = e.known(1) ? pow_by_constant(e, a, *e.known(1)) : kNoExprReg;
    if (simple != kNoExprReg) return simple;
    return e.emit(ExprOp::pow, {a, e.builder().cast(b, base)});
  }
  if (is_integer(exponent)) return e.emit(ExprOp::pow, {a, e.builder().cast(b, base)});
  // Integer to a broken power: as a float, cut to the integer type.
  const ExprReg wide = e.builder().cast(a, DType::f64);
  const ExprReg power = e.emit(ExprOp::pow, {wide, e.builder().cast(b, DType::f64)});
  return e.builder().cast(power, base);
}

}  // namespace

void register_exponential(OpRegistry& registry) {
  registry.add(denied(unary_def("Exp", 6, "Exponential.", kFloatTypes, ExprOp::exp, exp_gradient)));
  registry.add(
      denied(unary_def("Log", 6, "Natural logarithm.", kFloatTypes, ExprOp::log, log_gradient)));
  registry.add(unary_def("Sqrt", 6, "Square root.", kFloatTypes, ExprOp::sqrt, sqrt_gradient));
  registry.add(denied(
      unary_def("Reciprocal", 6, "1 / X.", kFloatTypes, ExprOp::reciprocal, reciprocal_gradient)));
  registry.add(unary_def("Erf", 9, "Error function.", kFloatTypes, ExprOp::erf, erf_gradient));

  OpDef pow = binary_def("Pow", 7, "X to the power of Y, in the type of X.", kNumericTypes,
                         ExprOp::pow, pow_gradient);
  pow.inputs = {{"X", "T"}, {"Y", "T1"}};
  pow.outputs = {{"Z", "T"}};
  pow.types = {{"T", kNumericTypes}, {"T1", kNumericTypes}};
  pow.expression = pow_expression;
  pow.precision = Precision::deny;
  registry.add(std::move(pow));
}

}  // namespace ortrain::ops
