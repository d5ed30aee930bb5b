// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/flops.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ops/matmul/matmul_problem.h"

namespace ortrain::ops {
namespace {

void infer_gemm(InferContext& context) {
  if (context.rank(0) != 2 || context.rank(1) != 2) {
    throw ShapeError(str("'A' and 'B' are matrices, have the shapes ", shape_str(context.shape(0)),
                         " and ", shape_str(context.shape(1))));
  }
  Shape y = matmul_shape(context.shape(0), context.shape(1), context.attrs().int_("transA") != 0,
                         context.attrs().int_("transB") != 0);
  if (context.has_input(2)) {
    const Shape& c = context.shape(2);
    const bool fits = c.size() <= 2 && broadcast(c, y) == y;
    if (!fits && is_constant(c) && is_constant(y)) {
      throw ShapeError(str("'C' of shape ", shape_str(c), " does not broadcast to ", shape_str(y)));
    }
  }
  context.set_output(0, context.dtype(0), std::move(y));
}

// Y = alpha op(A) op(B) + beta C.
void gemm_gradient(GradContext& g) {
  const ValueId dy = g.output_grad(0);
  const int64_t trans_a = g.attrs().int_("transA") != 0;
  const int64_t trans_b = g.attrs().int_("transB") != 0;
  const double alpha = g.attrs().float_("alpha");
  auto product = [&](ValueId left, int64_t trans_left, ValueId right, int64_t trans_right) {
    return g.op("Gemm", {left, right},
                {{"transA", trans_left}, {"transB", trans_right}, {"alpha", alpha}});
  };
  if (g.needs_grad(0)) {
    g.set_input_grad(
        0, trans_a ? product(g.input(1), trans_b, dy, 1) : product(dy, 0, g.input(1), 1 - trans_b));
  }
  if (g.needs_grad(1)) {
    g.set_input_grad(
        1, trans_b ? product(dy, 1, g.input(0), trans_a) : product(g.input(0), 1 - trans_a, dy, 0));
  }
  if (g.needs_grad(2)) {
    const ValueId dc = g.reduce_to_shape_of(dy, g.input(2));
    const double beta = g.attrs().float_("beta");
    g.set_input_grad(2, beta == 1.0 ? dc : g.mul(dc, beta));
  }
}

// Before opset 7 C broadcasts by an attribute, in the same way.
std::vector<ValueId> expand_earlier_gemm(ExpandContext& e) {
  return {e.op("Gemm", {e.input(0), e.input(1), e.input(2)},
               {{"alpha", e.attrs().float_("alpha")},
                {"beta", e.attrs().float_("beta")},
                {"transA", e.attrs().int_("transA")},
                {"transB", e.attrs().int_("transB")}})};
}

}  // namespace

void register_gemm(OpRegistry& registry) {
  registry.add({.name = "Gemm",
                .since = 1,
                .until = 6,
                .summary = "C is broadcast where an attribute says so.",
                .inputs = {{"A", "T"}, {"B", "T"}, {"C", "T"}},
                .outputs = {{"Y", "T"}},
                .attrs = {{"alpha", 1.0},
                          {"beta", 1.0},
                          {"broadcast", int64_t{0}},
                          {"transA", int64_t{0}},
                          {"transB", int64_t{0}}},
                .types = {{"T", kFloatTypes}},
                .expand = expand_earlier_gemm});
  registry.add(
      {.name = "Gemm",
       .since = 7,
       .summary = "alpha op(A) op(B) + beta C, C broadcast to the product.",
       .inputs = {{"A", "T"}, {"B", "T"}, {"C", "T", Arity::optional}},
       .outputs = {{"Y", "T"}},
       .attrs = {{"alpha", 1.0}, {"beta", 1.0}, {"transA", int64_t{0}}, {"transB", int64_t{0}}},
       .types = {{"T", kFloatTypes}},
       .precision = Precision::allow,
       .infer = infer_gemm,
       .gradient = gemm_gradient,
       .row_operand = 0,
       .flops = [](const NodeSpec& s) { return product_flops(s, "transA"); }});
}

}  // namespace ortrain::ops
