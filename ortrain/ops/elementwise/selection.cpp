// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/elementwise/elementwise_def.h"

namespace ortrain::ops {
namespace {

using Operands = std::span<const Dim>;

// Of two operands the one that loses has no gradient, equal ones have half of it each. Beside NaN
// neither loses.
void pair_gradient(GradContext& g, std::string_view loses) {
  const ValueId dy = g.output_grad(0);
  const ValueId zero = g.scalar(g.dtype(dy), 0.0);
  const ValueId a = g.input(0), b = g.input(1);
  const ValueId equal = g.op("Equal", {a, b}), half = g.mul(dy, 0.5);
  for (size_t i : {0, 1}) {
    if (!g.needs_grad(i)) continue;
    const ValueId lost = g.op(loses, {i == 0 ? a : b, i == 0 ? b : a});
    const ValueId share = g.where(equal, half, g.where(lost, zero, dy));
    g.set_input_grad(i, g.reduce_to_shape_of(share, g.input(i)));
  }
}

// The extreme shares its gradient evenly among the operands that attain it.
void extreme_gradient(GradContext& g, std::string_view loses) {
  if (g.num_inputs() == 2) {
    pair_gradient(g, loses);
    return;
  }
  const ValueId dy = g.output_grad(0);
  if (g.num_inputs() == 1) {
    g.set_input_grad(0, dy);
    return;
  }
  const ValueId y = g.output(0);
  std::vector<ValueId> attained;
  for (size_t i = 0; i < g.num_inputs(); ++i) {
    attained.push_back(g.cast(g.op("Equal", {g.input(i), y}), g.dtype(y)));
  }
  const ValueId share = g.div(dy, g.op("Sum", attained));
  for (size_t i = 0; i < g.num_inputs(); ++i) {
    if (!g.needs_grad(i)) continue;
    g.set_input_grad(i, g.reduce_to_shape_of(g.mul(share, attained[i]), g.input(i)));
  }
}

// --- Clip: min(max(x, low), high)

ExprReg clip_expression(ExprEmitter& e) {
  ExprReg result = e.input(0);
  if (e.has_input(1)) result = e.max(result, e.input(1));
  if (e.has_input(2)) result = e.min(result, e.input(2));
  return result;
}

void infer_clip(InferContext& context) {
  for (size_t i = 1; i < context.num_inputs(); ++i) {
    if (!context.has_input(i) || context.rank(i) == 0) continue;
    throw ShapeError(
        str("the bounds are scalars, input ", i, " has the shape ", shape_str(context.shape(i))));
  }
  infer_same_as_input(context);
}

void clip_gradient(GradContext& g) {
  const ValueId dy = g.output_grad(0);
  const ValueId x = g.input(0);
  const ValueId zero = g.scalar(g.dtype(x), 0.0);
  ValueId rest = dy;
  if (g.has_input(2)) {
    const ValueId above =
        g.op("Greater", {g.has_input(1) ? g.op("Max", {x, g.input(1)}) : x, g.input(2)});
    if (g.needs_grad(2)) {
      g.set_input_grad(2, g.reduce_to_shape_of(g.where(above, dy, zero), g.input(2)));
    }
    rest = g.where(above, zero, rest);
  }
  if (g.has_input(1) && g.needs_grad(1)) {
    rest = g.where(g.op("Less", {x, g.input(1)}), rest, zero);
    g.set_input_grad(1, g.reduce_to_shape_of(rest, g.input(1)));
  }
  if (!g.needs_grad(0)) return;
  // Asks what is inside: NaN is not, and has no gradient.
  ValueId inside = g.has_input(1) ? g.op("GreaterOrEqual", {x, g.input(1)}) : kNoValue;
  if (g.has_input(2)) {
    const ValueId under = g.op("LessOrEqual", {x, g.input(2)});
    inside = inside == kNoValue ? under : g.op("And", {inside, under});
  }
  g.set_input_grad(0, inside == kNoValue ? dy : g.where(inside, dy, zero));
}

// --- Where

void infer_where(InferContext& context) {
  Shape shape = broadcast(context.shape(0), context.shape(1));
  context.set_output(0, context.dtype(1), broadcast(shape, context.shape(2)));
  infer_contents(context, [](Operands x) -> std::optional<Dim> {
    if (x[0].is_constant()) return x[0].is(0) ? x[2] : x[1];
    return x[1] == x[2] ? std::optional(x[1]) : std::nullopt;
  });
}

void where_gradient(GradContext& g) {
  const ValueId dy = g.output_grad(0);
  const ValueId zero = g.scalar(g.dtype(dy), 0.0);
  if (g.needs_grad(1)) {
    const ValueId chosen = g.where(g.input(0), dy, zero);
    g.set_input_grad(1, g.reduce_to_shape_of(chosen, g.input(1)));
  }
  if (g.needs_grad(2)) {
    const ValueId chosen = g.where(g.input(0), zero, dy);
    g.set_input_grad(2, g.reduce_to_shape_of(chosen, g.input(2)));
  }
}

std::optional<Dim> fold(Operands x, Dim (*combine)(const Dim&, const Dim&)) {
  Dim result = x[0];
  for (size_t i = 1; i < x.size(); ++i) result = combine(result, x[i]);
  return result;
}

}  // namespace

void register_selection(OpRegistry& registry) {
  OpDef min_def = fold_def("Min", 8, "Smallest of any number of tensors; NaN wins.", kNumericTypes,
                           ExprOp::min, [](GradContext& g) { extreme_gradient(g, "Greater"); });
  min_def.infer = infer_arithmetic([](Operands x) { return fold(x, min); });
  registry.add(std::move(min_def));

  OpDef max_def = fold_def("Max", 8, "Largest of any number of tensors; NaN wins.", kNumericTypes,
                           ExprOp::max, [](GradContext& g) { extreme_gradient(g, "Less"); });
  max_def.infer = infer_arithmetic([](Operands x) { return fold(x, max); });
  registry.add(std::move(max_def));

  OpDef clip = unary_def("Clip", 11, "min(max(X, min), max).", kNumericTypes, clip_expression,
                         clip_gradient);
  clip.inputs = {{"input", "T"}, {"min", "T", Arity::optional}, {"max", "T", Arity::optional}};
  clip.outputs = {{"output", "T"}};
  clip.infer = infer_clip;
  registry.add(std::move(clip));

  OpDef where = unary_def(
      "Where", 9, "X where the condition holds, else Y.", kAllTypes,
      [](ExprEmitter& e) { return e.select(e.input(0), e.input(1), e.input(2)); }, where_gradient);
  where.inputs = {{"condition", "bool"}, {"X", "T"}, {"Y", "T"}};
  where.outputs = {{"output", "T"}};
  where.infer = infer_where;
  registry.add(std::move(where));
}

}  // namespace ortrain::ops
