// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/expand_context.h"
#include "ortrain/ops/elementwise/elementwise_def.h"

namespace ortrain::ops {

void register_rounding(OpRegistry& registry) {
  registry.add(unary_def("Floor", 6, "Largest integer not above X.", kFloatTypes, ExprOp::floor,
                         zero_gradient));
  registry.add(unary_def("Ceil", 6, "Smallest integer not below X.", kFloatTypes, ExprOp::ceil,
                         zero_gradient));
  registry.add(unary_def("Round", 11, "Nearest integer, halves to the even one.", kFloatTypes,
                         ExprOp::round, zero_gradient));
  OpDef trunc = unary_def(
      "Trunc", 1, "The integer part of X.", kFloatTypes,
      [](ExprEmitter& e) { return trunc_expression(e, e.input(0)); }, zero_gradient);
  trunc.domain = std::string(kOrtrainDomain);
  trunc.standard_form = [](ExpandContext& e) {
    const ValueId whole = e.unary("Floor", e.unary("Abs", e.input(0)));
    return std::vector{e.mul(e.unary("Sign", e.input(0)), whole)};
  };
  registry.add(std::move(trunc));
  registry.add(
      unary_def("Sign", 9, "-1, 0 or 1; NaN stays.", kNumericTypes, ExprOp::sign, zero_gradient));
}

}  // namespace ortrain::ops
