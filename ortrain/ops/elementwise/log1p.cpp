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
  OpDef log1p = denied(unary_def("Log1p", 1, "log(1 + X), exact near 0.", kFloatTypes,
                                 ExprOp::log1p, log1p_gradient));
  OpDef expm1 = denied(unary_def("Expm1", 1, "exp(X) - 1, exact near 0.", kFloatTypes,
                                 ExprOp::expm1, expm1_gradient));
  log1p.domain = kOrtrainDomain;
  expm1.domain = kOrtrainDomain;
  log1p.standard_form = [](ExpandContext& e) {
    // log(u) (x / (u - 1)) with u = 1 + x keeps the digits (Goldberg 1991, theorem 4).
    const ValueId x = e.input(0), u = e.add(x, 1.0), one = e.scalar(e.dtype(x), 1.0);
    const ValueId infinite =
        e.op("IsInf", {e.cast(u, e.dtype(x) == DType::f64 ? DType::f64 : DType::f32)});
    const ValueId plain = e.unary("Log", u);
    const ValueId exact = e.mul(plain, e.div(x, e.sub(u, 1.0)));
    return std::vector{e.where(e.op("Equal", {u, one}), x, e.where(infinite, plain, exact))};
  };
  expm1.standard_form = [](ExpandContext& e) {
    // (u - 1) x / log(u) with u = exp(x) keeps the digits; at the ends u - 1 does.
    const ValueId x = e.input(0), u = e.unary("Exp", x), one = e.scalar(e.dtype(x), 1.0);
    const ValueId rest = e.sub(u, 1.0);
    const ValueId near = e.op("Less", {e.unary("Abs", x), one});
    const ValueId exact = e.div(e.mul(rest, x), e.unary("Log", u));
    return std::vector{e.where(e.op("Equal", {u, one}), x, e.where(near, exact, rest))};
  };
  registry.add(std::move(log1p));
  registry.add(std::move(expm1));
}

}  // namespace ortrain::ops
