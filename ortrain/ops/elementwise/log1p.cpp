// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/expand_context.h"
#include "ortrain/ops/elementwise/elementwise_def.h"

namespace ortrain::ops {
namespace {

// 1 / (1 + x)
void log1p_gradient(GradContext& g) {
  g.set_input_grad(0, g.div(g.output_grad(0), g.add(g.input(0), 1.0)));
}

// exp(x)
void expm1_gradient(GradContext& g) {
  g.set_input_grad(0, g.mul(g.output_grad(0), g.add(g.output(0), 1.0)));
}

}  // namespace

// ONNX has neither; log(1 + x) and exp(x) - 1 lose the digits of a small x.
void register_log1p(OpRegistry& registry) {
  OpDef log1p = unary_def("Log1p", 1, "log(1 + X), exact near 0.", kFloatTypes, ExprOp::log1p,
                          log1p_gradient);
  OpDef expm1 = unary_def("Expm1", 1, "exp(X) - 1, exact near 0.", kFloatTypes, ExprOp::expm1,
                          expm1_gradient);
  log1p.domain = kOrtrainDomain;
  expm1.domain = kOrtrainDomain;
  log1p.standard_form = [](ExpandContext& e) {
    return std::vector{e.unary("Log", e.add(e.input(0), 1.0))};
  };
  expm1.standard_form = [](ExpandContext& e) {
    return std::vector{e.sub(e.unary("Exp", e.input(0)), 1.0)};
  };
  registry.add(std::move(log1p));
  registry.add(std::move(expm1));
}

}  // namespace ortrain::ops
