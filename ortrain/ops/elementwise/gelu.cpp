// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <numbers>

#include "ortrain/ops/elementwise/elementwise_def.h"

// Hendrycks and Gimpel, "Gaussian error linear units", 2016. With phi and Phi the density and the
// distribution function of the standard normal distribution:
//   none: y = x Phi(x), dy/dx = Phi(x) + x phi(x)
//   tanh: y = x/2 (1 + t), t = tanh(u), u = sqrt(2/pi) (x + 0.044715 x^3),
//         dy/dx = (1 + t)/2 + x/2 (1 - t^2) u'
namespace ortrain::ops {
namespace {

constexpr double kCubic = 0.044715;
const double kRootTwoOverPi = std::numbers::sqrt2 * std::numbers::inv_sqrtpi;

bool by_tanh(const AttributeReader& attrs) {
  const std::string& approximate = attrs.string_("approximate");
  if (approximate == "tanh") return true;
  if (approximate == "none") return false;
  throw InvalidModelError(
      str("attribute 'approximate' is '", approximate, "', expected 'none' or 'tanh'"));
}

// Phi(x), or its approximation (1 + t) / 2.
ExprReg distribution(ExprEmitter& e, ExprReg inner, ExprOp function) {
  const ExprReg half = e.number(0.5);
  return e.add(e.mul(e.unary(function, inner), half), half);
}

ExprReg erf_argument(ExprEmitter& e, ExprReg x) {
  return e.mul(x, e.number(1.0 / std::numbers::sqrt2));
}

ExprReg tanh_argument(ExprEmitter& e, ExprReg x) {
  const ExprReg factor =
      e.add(e.mul(e.mul(x, x), e.number(kRootTwoOverPi * kCubic)), e.number(kRootTwoOverPi));
  return e.mul(x, factor);
}

ExprReg gelu_expression(ExprEmitter& e) {
  const ExprReg x = e.input(0);
  if (by_tanh(e.attrs())) return e.mul(x, distribution(e, tanh_argument(e, x), ExprOp::tanh));
  return e.mul(x, distribution(e, erf_argument(e, x), ExprOp::erf));
}

ExprReg gelu_grad_expression(ExprEmitter& e) {
  const ExprReg dy = e.input(0);
  const ExprReg x = e.input(1);
  if (!by_tanh(e.attrs())) {
    const ExprReg phi = e.mul(e.unary(ExprOp::exp, e.mul(e.mul(x, x), e.number(-0.5))),
                              e.number(std::numbers::inv_sqrtpi / std::numbers::sqrt2));
    const ExprReg slope = e.add(distribution(e, erf_argument(e, x), ExprOp::erf), e.mul(x, phi));
    return e.mul(dy, slope);
  }
  // (1 + t)/2 = s and 1 - t^2 = 4 s (1 - s): dy/dx = s + 2 x s (1 - s) u'
  const ExprReg s = distribution(e, tanh_argument(e, x), ExprOp::tanh);
  const ExprReg twice_inner_slope = e.add(
      e.mul(e.mul(x, x), e.number(6.0 * kRootTwoOverPi * kCubic)), e.number(2.0 * kRootTwoOverPi));
  const ExprReg bend = e.mul(e.mul(x, twice_inner_slope), e.mul(s, e.sub(e.number(1.0), s)));
  return e.mul(dy, e.add(s, bend));
}

void gelu_gradient(GradContext& g) {
  const std::string approximate = g.attrs().string_("approximate");
  g.set_input_grad(
      0, g.own("GeluGrad", {g.output_grad(0), g.input(0)}, {{"approximate", approximate}}));
}

void infer_gelu(InferContext& context) {
  by_tanh(context.attrs());
  infer_broadcast(context);
}

}  // namespace

void register_gelu(OpRegistry& registry) {
  OpDef gelu = unary_def("Gelu", 20, "X Phi(X), Phi the normal distribution function.", kFloatTypes,
                         gelu_expression, gelu_gradient);
  gelu.attrs = {{"approximate", std::string("none")}};
  gelu.infer = infer_gelu;
  registry.add(std::move(gelu));

  OpDef grad = unary_def("GeluGrad", 1, "dY (Phi(X) + X phi(X)), the gradient of Gelu at X.",
                         kFloatTypes, gelu_grad_expression, nullptr);
  grad.domain = kOrtrainDomain;
  grad.inputs = {{"dY", "T"}, {"X", "T"}};
  grad.outputs = {{"dX", "T"}};
  grad.attrs = {{"approximate", std::string("none")}};
  grad.infer = infer_gelu;
  registry.add(std::move(grad));
}

}  // namespace ortrain::ops
