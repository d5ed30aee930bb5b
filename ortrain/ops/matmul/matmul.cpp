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

constexpr DTypeSet kMatMulIntegers{DType::i32, DType::i64, DType::u32, DType::u64};

void infer_matmul(InferContext& context) {
  context.set_output(0, context.dtype(0),
                     matmul_shape(context.shape(0), context.shape(1), false, false));
}

void infer_fused_matmul(InferContext& context) {
  const bool trans_a = context.attrs().int_("transA") != 0;
  const bool trans_b = context.attrs().int_("transB") != 0;
  if (context.rank(0) < 2 || context.rank(1) < 2) {
    throw ShapeError(str("both inputs need at least two dimensions, have the shapes ",
                         shape_str(context.shape(0)), " and ", shape_str(context.shape(1))));
  }
  context.set_output(0, context.dtype(0),
                     matmul_shape(context.shape(0), context.shape(1), trans_a, trans_b));
}

ValueId fused(GradContext& g, ValueId a, bool trans_a, ValueId b, bool trans_b, double alpha) {
  return g.own("FusedMatMul", {a, b},
               {{"transA", static_cast<int64_t>(trans_a)},
                {"transB", static_cast<int64_t>(trans_b)},
                {"alpha", alpha}});
}

// One matrix against many rows: its gradient is one product over all the rows.
bool is_shared_matrix(const GradContext& g, ValueId a, ValueId b) {
  return g.rank(b) == 2 && g.rank(a) >= 2;
}

void matmul_gradient(GradContext& g) {
  const ValueId a = g.input(0);
  const ValueId b = g.input(1);
  ValueId dy = g.output_grad(0);
  if (is_shared_matrix(g, a, b)) {
    if (g.needs_grad(0)) g.set_input_grad(0, fused(g, dy, false, b, true, 1.0));
    if (g.needs_grad(1)) g.set_input_grad(1, g.own("LinearWeightGrad", {a, dy}));
    return;
  }
  // Vectors become a row or a column, and so does the gradient of the product.
  const bool row = g.rank(a) == 1;
  const bool column = g.rank(b) == 1;
  const ValueId a2 = row ? g.unsqueeze(a, {0}) : a;
  const ValueId b2 = column ? g.unsqueeze(b, {1}) : b;
  if (column) dy = g.unsqueeze(dy, {-1});
  if (row) dy = g.unsqueeze(dy, {-2});
  if (g.needs_grad(0)) {
    const ValueId da = g.reduce_to_shape_of(fused(g, dy, false, b2, true, 1.0), a2);
    g.set_input_grad(0, row ? g.squeeze(da, {0}) : da);
  }
  if (g.needs_grad(1)) {
    const ValueId db = g.reduce_to_shape_of(fused(g, a2, true, dy, false, 1.0), b2);
    g.set_input_grad(1, column ? g.squeeze(db, {1}) : db);
  }
}

// y = alpha op(a) op(b); the gradient of op(x) is transposed back by the order of the factors.
void fused_matmul_gradient(GradContext& g) {
  const ValueId a = g.input(0);
  const ValueId b = g.input(1);
  const ValueId dy = g.output_grad(0);
  const bool trans_a = g.attrs().int_("transA") != 0;
  const bool trans_b = g.attrs().int_("transB") != 0;
  const double alpha = g.attrs().float_("alpha");
  if (g.needs_grad(0)) {
    const ValueId da =
        trans_a ? fused(g, b, trans_b, dy, true, alpha) : fused(g, dy, false, b, !trans_b, alpha);
    g.set_input_grad(0, g.reduce_to_shape_of(da, a));
  }
  if (g.needs_grad(1)) {
    const ValueId db =
        trans_b ? fused(g, dy, true, a, trans_a, alpha) : fused(g, a, !trans_a, dy, false, alpha);
    g.set_input_grad(1, g.reduce_to_shape_of(db, b));
  }
}

std::vector<ValueId> fused_matmul_form(ExpandContext& e) {
  const auto operand = [&](size_t i, const char* transposed) {
    const ValueId value = e.input(i);
    return e.attrs().int_(transposed) != 0 && e.rank(value) > 1 ? e.transpose_last_two(value)
                                                                : value;
  };
  const ValueId product = e.op("MatMul", {operand(0, "transA"), operand(1, "transB")});
  const double alpha = e.attrs().float_("alpha");
  return {alpha == 1.0 ? product : e.mul(product, alpha)};
}

}  // namespace

void register_matmul(OpRegistry& registry) {
  registry.add({.name = "MatMul",
                .since = 1,
                .summary = "Matrix product with the broadcasting of numpy.matmul.",
                .inputs = {{"A", "T"}, {"B", "T"}},
                .outputs = {{"Y", "T"}},
                .types = {{"T", kFloatTypes | kMatMulIntegers}},
                .precision = Precision::allow,
                .infer = infer_matmul,
                .gradient = matmul_gradient,
                .row_operand = 0,
                .flops = [](const NodeSpec& s) { return product_flops(s); }});
  registry.add({.name = "FusedMatMul",
                .domain = std::string(kOrtrainDomain),
                .summary = "alpha op(A) op(B), op transposing the last two dimensions where asked; "
                           "leading dimensions broadcast.",
                .inputs = {{"A", "T"}, {"B", "T"}},
                .outputs = {{"Y", "T"}},
                .attrs = {{"transA", int64_t{0}}, {"transB", int64_t{0}}, {"alpha", 1.0}},
                .types = {{"T", kFloatTypes}},
                .precision = Precision::allow,
                .infer = infer_fused_matmul,
                .gradient = fused_matmul_gradient,
                .flops = [](const NodeSpec& s) { return product_flops(s, "transA"); },
                .standard_form = fused_matmul_form});
}

}  // namespace ortrain::ops
