// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/flops.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::ops {
namespace {

bool differ(const Dim& a, const Dim& b) { return a.is_constant() && b.is_constant() && !(a == b); }

void check_rank(const InferContext& context, size_t index, int64_t rank, const char* name) {
  if (context.rank(index) != rank) {
    throw ShapeError(
        str(name, " is ", shape_str(context.shape(index)), "; it must have rank ", rank));
  }
}

void infer_grouped_matmul(InferContext& context) {
  check_rank(context, 0, 2, "x");
  check_rank(context, 1, 3, "w");
  check_rank(context, 2, 1, "offsets");
  const bool transposed = context.attrs().int_("trans_w") != 0;
  const Shape &x = context.shape(0), &w = context.shape(1);
  const Dim &depth = w[transposed ? 2 : 1], &width = w[transposed ? 1 : 2];
  if (differ(x[1], depth) || differ(w[0], context.shape(2)[0])) {
    throw ShapeError(str("x ", shape_str(x), ", w ", shape_str(w),
                         transposed ? " (transposed)" : "", " and offsets ",
                         shape_str(context.shape(2)), " do not fit"));
  }
  context.set_output(0, context.dtype(0), {x[0], width});
}

void infer_weight_grad(InferContext& context) {
  check_rank(context, 0, 2, "x");
  check_rank(context, 1, 2, "dy");
  check_rank(context, 2, 1, "offsets");
  const Shape &x = context.shape(0), &dy = context.shape(1);
  if (differ(x[0], dy[0])) {
    throw ShapeError(str("x ", shape_str(x), " and dy ", shape_str(dy), " differ in rows"));
  }
  context.set_output(0, context.dtype(0), {context.shape(2)[0], x[1], dy[1]});
}

void grouped_matmul_gradient(GradContext& g) {
  const bool transposed = g.attrs().int_("trans_w") != 0;
  const ValueId dy = g.output_grad(0), x = g.input(0), offsets = g.input(2);
  if (g.needs_grad(0)) {
    g.set_input_grad(
        0, g.own("GroupedMatMul", {dy, g.input(1), offsets}, {{"trans_w", int64_t{!transposed}}}));
  }
  if (g.needs_grad(1)) {
    g.set_input_grad(
        1, g.own("GroupedMatMulWeightGrad", {transposed ? dy : x, transposed ? x : dy, offsets}));
  }
}

// dw[e] = x_e^T * dy_e is linear in both.
void weight_grad_gradient(GradContext& g) {
  const ValueId ddw = g.output_grad(0), offsets = g.input(2);
  if (g.needs_grad(0)) {
    g.set_input_grad(0,
                     g.own("GroupedMatMul", {g.input(1), ddw, offsets}, {{"trans_w", int64_t{1}}}));
  }
  if (g.needs_grad(1)) g.set_input_grad(1, g.own("GroupedMatMul", {g.input(0), ddw, offsets}));
}

// A product per group of all rows, of which its own are taken: sizes that depend on the offsets
// have no form.
std::vector<ValueId> grouped_matmul_form(ExpandContext& e) {
  const ValueId x = e.input(0), w = e.input(1);
  const ValueId ends = e.cast(e.input(2), DType::i64);
  const ValueId rows = e.positions(x, 0), nothing = e.scalar(e.dtype(x), 0.0);
  const int64_t groups = e.known_extent(w, 0, "groups");
  e.check_listed(groups, "groups");
  const ValueId width = e.extent_of(w, e.attrs().int_("trans_w") != 0 ? 1 : 2);
  ValueId sum = kNoValue;
  for (int64_t g = 0; g < groups; ++g) {
    ValueId mine = e.op("Less", {rows, e.slice(ends, 0, g, g + 1)});
    if (g > 0) {
      mine = e.op("And", {mine, e.op("GreaterOrEqual", {rows, e.slice(ends, 0, g - 1, g)})});
    }
    ValueId weight = e.squeeze(e.slice(w, 0, g, g + 1), {0});
    if (e.attrs().int_("trans_w") != 0) weight = e.transpose(weight, {1, 0});
    const ValueId product = e.op("MatMul", {x, weight});
    sum = e.where(e.unsqueeze(mine, {1}), product, g == 0 ? nothing : sum);
  }
  if (groups > 0) return {sum};
  return {e.op("Expand", {nothing, e.concat({e.extent_of(x, 0), width}, 0)})};
}

}  // namespace

void register_grouped_matmul(OpRegistry& registry) {
  registry.add({.name = "GroupedMatMul",
                .domain = std::string(kOrtrainDomain),
                .summary =
                    "Rows [offsets[e-1], offsets[e]) of x [T, K] times w[e] [K, N] (or [N, K] "
                    "with trans_w); rows behind the last group are 0.",
                .inputs = {{"x", "T"}, {"w", "T"}, {"offsets", "I"}},
                .outputs = {{"y", "T"}},
                .attrs = {{"trans_w", int64_t{0}}},
                .types = {{"T", kFloatTypes}, {"I", kIndexTypes}},
                .precision = Precision::allow,
                .infer = infer_grouped_matmul,
                .gradient = grouped_matmul_gradient,
                .flops = [](const NodeSpec& s) { return product_flops(s); },
                .standard_form = grouped_matmul_form});
  registry.add({.name = "GroupedMatMulWeightGrad",
                .domain = std::string(kOrtrainDomain),
                .summary = "dw[e] = x_e^T * dy_e with the rows of each group; 0 for empty groups.",
                .inputs = {{"x", "T"}, {"dy", "T"}, {"offsets", "I"}},
                .outputs = {{"dw", "T"}},
                .attrs = {},
                .types = {{"T", kFloatTypes}, {"I", kIndexTypes}},
                .infer = infer_weight_grad,
                .gradient = weight_grad_gradient,
                .flops = weight_grad_flops});
}

}  // namespace ortrain::ops
