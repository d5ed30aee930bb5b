// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/expand_context.h"
#include "ortrain/ops/elementwise/elementwise_def.h"

namespace ortrain::ops {
namespace {

using Operands = std::span<const Dim>;

void add_gradient(GradContext& g) {
  for (size_t i = 0; i < g.num_inputs(); ++i) {
    if (g.needs_grad(i)) g.set_input_grad(i, g.reduce_to_shape_of(g.output_grad(0), g.input(i)));
  }
}

void sub_gradient(GradContext& g) {
  const ValueId dy = g.output_grad(0);
  if (g.needs_grad(0)) g.set_input_grad(0, g.reduce_to_shape_of(dy, g.input(0)));
  if (g.needs_grad(1)) g.set_input_grad(1, g.reduce_to_shape_of(g.neg(dy), g.input(1)));
}

void mul_gradient(GradContext& g) {
  const ValueId dy = g.output_grad(0);
  for (size_t i = 0; i < 2; ++i) {
    if (!g.needs_grad(i)) continue;
    g.set_input_grad(i, g.reduce_to_shape_of(g.mul(dy, g.input(1 - i)), g.input(i)));
  }
}

// d(a/b)/da = 1/b, d(a/b)/db = -(a/b)/b
void div_gradient(GradContext& g) {
  const ValueId da = g.div(g.output_grad(0), g.input(1));
  if (g.needs_grad(0)) g.set_input_grad(0, g.reduce_to_shape_of(da, g.input(0)));
  if (g.needs_grad(1)) {
    const ValueId db = g.neg(g.mul(da, g.output(0)));
    g.set_input_grad(1, g.reduce_to_shape_of(db, g.input(1)));
  }
}

// a mod b = a - b q with an integer q, so the derivative by b is -q.
void mod_gradient(GradContext& g) {
  const ValueId dy = g.output_grad(0);
  if (g.needs_grad(0)) g.set_input_grad(0, g.reduce_to_shape_of(dy, g.input(0)));
  if (g.needs_grad(1)) {
    const ValueId q = g.op("Round", {g.div(g.sub(g.input(0), g.output(0)), g.input(1))});
    g.set_input_grad(1, g.reduce_to_shape_of(g.neg(g.mul(dy, q)), g.input(1)));
  }
}

// PyTorch's `//` has no derivative, its div(rounding_mode="floor") one of zeros.
void floor_div_gradient(GradContext& g) {
  if (g.attrs().int_("differentiable") == 0) throw UnsupportedError("floor_divide has no gradient");
  zero_gradient(g);
}

void neg_gradient(GradContext& g) { g.set_input_grad(0, g.neg(g.output_grad(0))); }

void abs_gradient(GradContext& g) {
  g.set_input_grad(0, g.mul(g.output_grad(0), g.sign_or_zero(g.input(0))));
}

void mean_gradient(GradContext& g) {
  const ValueId share = g.div(g.output_grad(0), static_cast<double>(g.num_inputs()));
  for (size_t i = 0; i < g.num_inputs(); ++i) {
    if (g.needs_grad(i)) g.set_input_grad(i, g.reduce_to_shape_of(share, g.input(i)));
  }
}

ExprReg mean_expression(ExprEmitter& e) {
  ExprReg sum = e.input(0);
  for (size_t i = 1; i < e.num_inputs(); ++i) sum = e.add(sum, e.input(i));
  return e.div(sum, e.number(static_cast<double>(e.num_inputs())));
}

ExprReg mod_expression(ExprEmitter& e) {
  const bool c_style = e.attrs().int_("fmod") != 0;
  return e.emit(c_style ? ExprOp::fmod : ExprOp::mod, {e.input(0), e.input(1)});
}

std::optional<Dim> floor_div_contents(Operands x) {
  if (x[1].is(0)) return std::nullopt;
  return floor_div(x[0], x[1]);
}

// Towards zero: equal to the floor where both are known not to be negative.
std::optional<Dim> div_contents(Operands x) {
  if (x[1].is(0)) return std::nullopt;
  // What the smallest integer gives is none of 64 bits.
  if (x[1].is(-1)) return Dim(0) - x[0];
  if (x[0].is_constant() && x[1].is_constant()) return Dim(x[0].constant() / x[1].constant());
  if (!provably_nonnegative(x[0]) || !provably_nonnegative(x[1])) return std::nullopt;
  return floor_div(x[0], x[1]);
}

void infer_mod(InferContext& context) {
  infer_broadcast(context);
  const bool c_style = context.attrs().int_("fmod") != 0;
  if (!c_style && is_float(context.dtype(0))) {
    throw UnsupportedError(
        str("takes integers when fmod is 0 (floats are ONNX's since opset 28), has ",
            name_of(context.dtype(0)), "; set fmod to 1"));
  }
  infer_contents(context, [c_style](Operands x) -> std::optional<Dim> {
    if (x[1].is(0)) return std::nullopt;
    if (c_style && !(provably_nonnegative(x[0]) && provably_nonnegative(x[1]))) {
      return std::nullopt;
    }
    return x[0] - floor_div(x[0], x[1]) * x[1];
  });
}

// By the remainder, as PyTorch and Python do: the quotient may round up to a whole number.
ValueId floor_div_of_floats(ExpandContext& e, ValueId a, ValueId b) {
  const DType type = e.dtype(a);
  const ValueId zero = e.scalar(type, 0.0), plain = e.div(a, b);
  const ValueId rest = e.op("Mod", {a, b}, {{"fmod", int64_t{1}}});
  const ValueId differ = e.op("Xor", {e.op("Less", {rest, zero}), e.op("Less", {b, zero})});
  const ValueId inexact = e.op("Not", {e.op("Equal", {rest, zero})});
  const ValueId above = e.cast(e.op("And", {inexact, differ}), type);
  const ValueId share = e.sub(e.div(e.sub(a, rest), b), above);
  const ValueId whole = e.unary("Floor", share);
  const ValueId high = e.op("Greater", {e.sub(share, whole), e.scalar(type, 0.5)});
  const ValueId nearest = e.add(whole, e.cast(high, type));
  return e.where(e.op("Equal", {b, zero}), plain, nearest);
}

// Division of integers cuts towards zero: one less where it cut upwards.
std::vector<ValueId> floor_div_form(ExpandContext& e) {
  const ValueId a = e.input(0), b = e.input(1), quotient = e.div(a, b);
  if (is_float(e.dtype(a))) return {floor_div_of_floats(e, a, b)};
  if (!is_signed_integer(e.dtype(a))) return {quotient};
  const ValueId rest = e.sub(a, e.mul(quotient, b)), zero = e.scalar(e.dtype(a), 0.0);
  const ValueId exact = e.op("Equal", {rest, zero});
  const ValueId signs_differ = e.op("Xor", {e.op("Less", {rest, zero}), e.op("Less", {b, zero})});
  const ValueId cut_up = e.op("And", {e.op("Not", {exact}), signs_differ});
  return {e.sub(quotient, e.cast(cut_up, e.dtype(a)))};
}

std::vector<ValueId> trunc_div_form(ExpandContext& e) {
  const ValueId quotient = e.div(e.input(0), e.input(1));
  return {e.mul(e.unary("Sign", quotient), e.unary("Floor", e.unary("Abs", quotient)))};
}

}  // namespace

void register_arithmetic(OpRegistry& registry) {
  OpDef add = binary_def("Add", 7, "Sum of two tensors.", kNumericTypes, ExprOp::add, add_gradient);
  add.infer = infer_arithmetic([](Operands x) { return std::optional(x[0] + x[1]); });
  registry.add(std::move(add));

  OpDef sub =
      binary_def("Sub", 7, "Difference of two tensors.", kNumericTypes, ExprOp::sub, sub_gradient);
  sub.infer = infer_arithmetic([](Operands x) { return std::optional(x[0] - x[1]); });
  registry.add(std::move(sub));

  OpDef mul =
      binary_def("Mul", 7, "Product of two tensors.", kNumericTypes, ExprOp::mul, mul_gradient);
  mul.infer = infer_arithmetic([](Operands x) { return std::optional(x[0] * x[1]); });
  registry.add(std::move(mul));

  OpDef div = binary_def("Div", 7, "Quotient of two tensors; integers are cut towards zero.",
                         kNumericTypes, ExprOp::div, div_gradient);
  div.infer = infer_arithmetic(div_contents);
  registry.add(std::move(div));

  OpDef floor_div =
      binary_def("FloorDiv", 1, "floor(A / B), of integers and floats, as Python's //.",
                 kNumericTypes, ExprOp::floor_div, floor_div_gradient);
  floor_div.attrs = {{"differentiable", int64_t{1}}};
  OpDef trunc_div = binary_def("TruncDiv", 1, "The integer part of A / B.", kFloatTypes,
                               ExprOp::div, zero_gradient);
  trunc_div.domain = kOrtrainDomain;
  trunc_div.standard_form = trunc_div_form;
  trunc_div.expression = [](ExprEmitter& e) {
    return trunc_expression(e, e.emit(ExprOp::div, {e.input(0), e.input(1)}));
  };
  registry.add(std::move(trunc_div));
  floor_div.domain = kOrtrainDomain;
  floor_div.standard_form = floor_div_form;
  floor_div.infer = infer_arithmetic(floor_div_contents);
  registry.add(std::move(floor_div));

  OpDef mod = binary_def(
      "Mod", 10, "Remainder; with the sign of B for fmod = 0 (integers), of A for fmod = 1.",
      kNumericTypes, ExprOp::mod, mod_gradient);
  mod.attrs = {{"fmod", int64_t{0}}};
  mod.infer = infer_mod;
  mod.expression = mod_expression;
  registry.add(std::move(mod));

  OpDef neg =
      unary_def("Neg", 6, "-X.", kFloatTypes | kSignedIntegerTypes, ExprOp::neg, neg_gradient);
  neg.infer = infer_arithmetic([](Operands x) { return std::optional(Dim(0) - x[0]); });
  registry.add(std::move(neg));

  registry.add(unary_def("Abs", 6, "Absolute value.", kNumericTypes, ExprOp::abs, abs_gradient));

  registry.add(
      fold_def("Sum", 8, "Sum of any number of tensors.", kFloatTypes, ExprOp::add, add_gradient));
  OpDef mean = fold_def("Mean", 8, "Mean of any number of tensors.", kFloatTypes, ExprOp::add,
                        mean_gradient);
  mean.expression = mean_expression;
  registry.add(std::move(mean));
}

}  // namespace ortrain::ops
