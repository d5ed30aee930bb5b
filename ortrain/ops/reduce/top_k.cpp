// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

void infer_top_k(InferContext& context) {
  Shape shape = context.shape(0);
  const int64_t axis = normalize_axis(context.attrs().int_("axis"), shape.size());
  const std::vector<Dim> k = required_known(context, 1, "K");
  if (k.size() != 1) throw ShapeError("input 'K' must hold one element");
  Dim& extent = shape[static_cast<size_t>(axis)];
  const bool negative = k[0].is_constant() && k[0].constant() < 0;
  const bool too_many =
      k[0].is_constant() && extent.is_constant() && k[0].constant() > extent.constant();
  if (negative || too_many) {
    throw ShapeError(str("K = ", k[0].str(), " is out of range for axis ", axis, " of shape ",
                         shape_str(shape)));
  }
  extent = k[0];
  context.set_output(0, context.dtype(0), shape);
  context.set_output(1, DType::i64, std::move(shape));
}

void top_k_gradient(GradContext& g) {
  if (!g.needs_grad(0) || !g.has_output_grad(0)) return;
  const int64_t axis = g.attrs().int_("axis");
  g.set_input_grad(
      0, g.op("ScatterElements", {g.zeros_like(g.input(0)), g.output(1), g.output_grad(0)},
              {{"axis", axis}}));
}

void infer_non_zero(InferContext& context) {
  context.set_output(0, DType::i64, {Dim(context.rank(0)), context.unknown_extent(0, 1)});
}

}  // namespace

void register_top_k(OpRegistry& registry);
void register_top_k(OpRegistry& registry) {
  registry.add({.name = "TopK",
                .since = 11,
                .summary = "The K largest (or smallest) elements along an axis, in order, and "
                           "their positions; the lower position first among equals, NaN largest.",
                .inputs = {{"X", "T"}, {"K", "int64"}},
                .outputs = {{"Values", "T"}, {"Indices", "int64"}},
                .attrs = {{"axis", int64_t{-1}}, {"largest", int64_t{1}}, {"sorted", int64_t{1}}},
                .types = {{"T", kNumericTypes}},
                .infer = infer_top_k,
                .gradient = top_k_gradient});
  registry.add({.name = "NonZero",
                .since = 9,
                .summary = "Positions of the elements that are not zero. How many there are "
                           "depends on data, so no plan can hold it.",
                .inputs = {{"X", "T"}},
                .outputs = {{"Y", "int64"}},
                .types = {{"T", kAllTypes}},
                .infer = infer_non_zero,
                .differentiable = false});
}

}  // namespace ortrain::ops
