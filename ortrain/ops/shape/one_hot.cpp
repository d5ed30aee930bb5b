// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

void infer_one_hot(InferContext& context) {
  const Shape known = required_known(context, 1, "depth");
  if (known.size() != 1) {
    throw ShapeError(str("depth must be one number, has the shape ", shape_str(context.shape(1))));
  }
  const Dim depth = known.front();
  if (depth.is_constant() && depth.constant() < 0) {
    throw ShapeError(str("depth is negative: ", depth.str()));
  }
  if (context.rank(2) != 1 || !same_extent(context.shape(2)[0], Dim(2)).is(2)) {
    throw ShapeError("input 'values' must hold two elements: off and on");
  }
  Shape shape = context.shape(0);
  const int64_t axis = normalize_axis(context.attrs().int_("axis"), shape.size() + 1);
  shape.insert(shape.begin() + axis, depth);
  checked_product(shape);
  context.set_output(0, context.dtype(2), std::move(shape));
}

// values = [off, on]: each gets the sum of the gradients where it stands.
void one_hot_gradient(GradContext& g) {
  if (!g.needs_grad(2)) return;
  const ValueId dy = g.output_grad(0);
  void* data = nullptr;
  TensorData zero_one = TensorData::allocate(DType::i64, {2}, &data);
  static_cast<int64_t*>(data)[1] = 1;
  const ValueId off_on = g.cast(g.constant(std::move(zero_one)), g.dtype(dy));
  const ValueId hot =
      g.op("OneHot", {g.input(0), g.input(1), off_on}, {{"axis", g.attrs().int_("axis")}});
  const ValueId on = g.reduce_sum(g.mul(dy, hot), {}, false);
  const ValueId cold = g.sub(g.scalar(g.dtype(dy), 1.0), hot);
  const ValueId off = g.reduce_sum(g.mul(dy, cold), {}, false);
  g.set_input_grad(
      2, g.op("Concat", {g.unsqueeze(off, {0}), g.unsqueeze(on, {0})}, {{"axis", int64_t{0}}}));
}

}  // namespace

void register_one_hot(OpRegistry& registry);
void register_one_hot(OpRegistry& registry) {
  registry.add({.name = "OneHot",
                .since = 9,
                .summary = "values[1] where the position along axis equals the index, values[0] "
                           "elsewhere; indices out of range give a row of values[0].",
                .inputs = {{"indices", "T1"}, {"depth", "T2"}, {"values", "T3"}},
                .outputs = {{"output", "T3"}},
                .attrs = {{"axis", int64_t{-1}}},
                .types = {{"T1", kNumericTypes}, {"T2", kIntegerTypes}, {"T3", kAllTypes}},
                .infer = infer_one_hot,
                .gradient = one_hot_gradient});
}

}  // namespace ortrain::ops
