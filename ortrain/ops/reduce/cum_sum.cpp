// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

void infer_cum_sum(InferContext& context) {
  normalize_axis(required_int(context, 1, "axis"), context.shape(0).size());
  context.set_output(0, context.dtype(0), context.shape(0));
}

// y_j sums what stands before, so x_j is in all that stand behind: the other direction.
void cum_sum_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  const int64_t forwards = g.attrs().int_("reverse") == 0;
  g.set_input_grad(0, g.op("CumSum", {g.output_grad(0), g.input(1)},
                           {{"exclusive", g.attrs().int_("exclusive")}, {"reverse", forwards}}));
}

}  // namespace

void register_cum_sum(OpRegistry& registry);
void register_cum_sum(OpRegistry& registry) {
  registry.add(
      {.name = "CumSum",
       .since = 11,
       .summary = "Running sums along an axis, from either end, with or without the "
                  "element itself.",
       .inputs = {{"x", "T"}, {"axis", "T2"}},
       .outputs = {{"y", "T"}},
       .attrs = {{"exclusive", int64_t{0}}, {"reverse", int64_t{0}}},
       .types = {{"T", kFloatTypes | DTypeSet{DType::i32, DType::i64, DType::u32, DType::u64}},
                 {"T2", kIndexTypes}},
       .precision = Precision::deny,
       .infer = infer_cum_sum,
       .gradient = cum_sum_gradient});
}

}  // namespace ortrain::ops
