// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "ortrain/ops/elementwise/elementwise_def.h"

namespace ortrain::ops {
namespace {

using Operands = std::span<const Dim>;

std::optional<Dim> equal_contents(Operands x) {
  if (x[0] == x[1]) return Dim(1);
  // The difference of two integers may be none.
  if (x[0].is_constant() && x[1].is_constant()) return Dim(0);
  // -1 stands for "any" in shapes; no extent is negative.
  for (const auto& [one, other] : {std::pair(x[0], x[1]), std::pair(x[1], x[0])}) {
    if (one.is_constant() && one.constant() < 0 && provably_nonnegative(other)) return Dim(0);
  }
  if ((x[0] - x[1]).is_constant()) return Dim(0);
  return std::nullopt;
}

// Decides a < b (or a <= b) when the difference is a constant.
std::optional<Dim> less_contents(const Dim& a, const Dim& b, bool or_equal) {
  if (a.is_constant() && b.is_constant()) {
    return Dim(a.constant() < b.constant() || (or_equal && a == b) ? 1 : 0);
  }
  const Dim difference = a - b;
  if (!difference.is_constant()) return std::nullopt;
  const int64_t value = difference.constant();
  return Dim(value < 0 || (or_equal && value == 0) ? 1 : 0);
}

OpDef compare_def(std::string name, int since, std::string summary, DTypeSet types,
                  Expression expression) {
  OpDef def = binary_def(std::move(name), since, std::move(summary), types, ExprOp::eq, nullptr);
  def.outputs = {{"C", "bool"}};
  def.differentiable = false;
  def.expression = std::move(expression);
  return def;
}

void infer_order(InferContext& context, bool swapped, bool or_equal) {
  infer_broadcast_bool(context);
  infer_contents(context, [=](Operands x) {
    return swapped ? less_contents(x[1], x[0], or_equal) : less_contents(x[0], x[1], or_equal);
  });
}

void add_order(OpRegistry& registry, const char* name, int since, const char* summary, ExprOp op,
               bool swapped) {
  OpDef def = compare_def(name, since, summary, kNumericTypes, [=](ExprEmitter& e) {
    return swapped ? e.emit(op, {e.input(1), e.input(0)}) : e.emit(op, {e.input(0), e.input(1)});
  });
  def.infer = [=](InferContext& context) { infer_order(context, swapped, op == ExprOp::le); };
  registry.add(std::move(def));
}

ExprReg is_inf_expression(ExprEmitter& e) {
  const ExprReg x = e.input(0);
  const double infinity = std::numeric_limits<double>::infinity();
  const bool positive = e.attrs().int_("detect_positive") != 0;
  const bool negative = e.attrs().int_("detect_negative") != 0;
  const ExprReg above = e.emit(ExprOp::eq, {x, e.number(infinity)});
  const ExprReg below = e.emit(ExprOp::eq, {x, e.number(-infinity)});
  if (positive && negative) return e.emit(ExprOp::logical_or, {above, below});
  if (positive) return above;
  if (negative) return below;
  return e.emit(ExprOp::logical_and, {above, below});  // never
}

OpDef test_def(const char* name, const char* summary, Expression expression) {
  OpDef def = unary_def(name, 9, summary, kFloatTypes, std::move(expression), nullptr);
  def.outputs = {{"Y", "bool"}};
  def.differentiable = false;
  def.infer = infer_broadcast_bool;
  return def;
}

}  // namespace

void register_comparison(OpRegistry& registry) {
  OpDef equal = compare_def("Equal", 7, "A == B.", kAllTypes, [](ExprEmitter& e) {
    return e.emit(ExprOp::eq, {e.input(0), e.input(1)});
  });
  equal.infer = [](InferContext& context) {
    infer_broadcast_bool(context);
    infer_contents(context, equal_contents);
  };
  registry.add(std::move(equal));
  add_order(registry, "Less", 7, "A < B.", ExprOp::lt, false);
  add_order(registry, "LessOrEqual", 12, "A <= B.", ExprOp::le, false);
  add_order(registry, "Greater", 7, "A > B.", ExprOp::lt, true);
  add_order(registry, "GreaterOrEqual", 12, "A >= B.", ExprOp::le, true);

  registry.add(test_def("IsNaN", "Whether X is not a number.", [](ExprEmitter& e) {
    return e.emit(ExprOp::ne, {e.input(0), e.input(0)});
  }));
  OpDef is_inf =
      test_def("IsInf", "Whether X is infinite, of the signs asked for.", is_inf_expression);
  is_inf.attrs = {{"detect_negative", int64_t{1}}, {"detect_positive", int64_t{1}}};
  registry.add(std::move(is_inf));
}

}  // namespace ortrain::ops
