// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

void infer_trilu(InferContext& context) {
  if (context.rank(0) < 2) {
    throw ShapeError(str("the input needs two axes at least, it has the shape ",
                         shape_str(context.shape(0))));
  }
  if (context.has_input(1)) {
    const Dim elements = checked_product(context.shape(1));
    if (elements.is_constant() && !elements.is(1)) throw ShapeError("input 'k' must be a scalar");
  }
  context.set_output(0, context.dtype(0), context.shape(0));
}

void trilu_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  g.set_input_grad(0, g.op("Trilu", {g.output_grad(0), g.input(1)},
                           {{"upper", g.attrs().int_("upper")}}));
}

}  // namespace

void register_trilu(OpRegistry& registry);
void register_trilu(OpRegistry& registry) {
  registry.add({.name = "Trilu",
                .since = 14,
                .summary = "Keeps the upper (or lower) triangle of matrices from diagonal k on.",
                .inputs = {{"input", "T"}, {"k", "int64", Arity::optional}},
                .outputs = {{"output", "T"}},
                .attrs = {{"upper", int64_t{1}}},
                .types = {{"T", kAllTypes}},
                .infer = infer_trilu,
                .gradient = trilu_gradient});
}

}  // namespace ortrain::ops
