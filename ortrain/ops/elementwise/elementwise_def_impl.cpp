// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <utility>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/ops/elementwise/elementwise_def.h"

namespace ortrain::ops {

OpDef unary_def(std::string name, int since, std::string summary, DTypeSet types,
                Expression expression, Gradient gradient) {
  OpDef def;
  def.name = std::move(name);
  def.since = since;
  def.summary = std::move(summary);
  def.inputs = {{"X", "T"}};
  def.outputs = {{"Y", "T"}};
  def.types = {{"T", types}};
  def.infer = infer_same_as_input;
  def.gradient = std::move(gradient);
  def.expression = std::move(expression);
  return def;
}

OpDef unary_def(std::string name, int since, std::string summary, DTypeSet types, ExprOp op,
                Gradient gradient) {
  return unary_def(
      std::move(name), since, std::move(summary), types,
      [op](ExprEmitter& e) { return e.unary(op, e.input(0)); }, std::move(gradient));
}

OpDef binary_def(std::string name, int since, std::string summary, DTypeSet types, ExprOp op,
                 Gradient gradient) {
  OpDef def = unary_def(
      std::move(name), since, std::move(summary), types,
      [op](ExprEmitter& e) { return e.emit(op, {e.input(0), e.input(1)}); }, std::move(gradient));
  def.inputs = {{"A", "T"}, {"B", "T"}};
  def.outputs = {{"C", "T"}};
  def.infer = infer_broadcast;
  return def;
}

OpDef fold_def(std::string name, int since, std::string summary, DTypeSet types, ExprOp op,
               Gradient gradient) {
  OpDef def = unary_def(
      std::move(name), since, std::move(summary), types,
      [op](ExprEmitter& e) {
        ExprReg result = e.input(0);
        for (size_t i = 1; i < e.num_inputs(); ++i) result = e.emit(op, {result, e.input(i)});
        return result;
      },
      std::move(gradient));
  def.inputs = {{"data_0", "T", Arity::variadic}};
  def.infer = infer_broadcast;
  return def;
}

OpDef denied(OpDef def) {
  def.precision = Precision::deny;
  return def;
}

ExprReg trunc_expression(ExprEmitter& e, ExprReg x) {
  const ExprReg size = e.unary(ExprOp::floor, e.unary(ExprOp::abs, x));
  return e.emit(ExprOp::mul, {e.unary(ExprOp::sign, x), size});
}

void zero_gradient(GradContext& g) {
  for (size_t i = 0; i < g.num_inputs(); ++i) {
    if (g.needs_grad(i)) g.set_input_grad(i, g.zeros_like(g.input(i)));
  }
}

void infer_contents(InferContext& context,
                    const std::function<std::optional<Dim>(std::span<const Dim>)>& element) {
  const InferredValue& output = context.outputs()[0];
  if (is_float(output.dtype) || output.shape.size() > 1) return;
  if (!output.shape.empty() && !output.shape[0].is_constant()) return;
  for (size_t i = 0; i < context.num_inputs(); ++i) {
    if (context.has_input(i) && !context.known(i)) return;
  }
  const size_t length = output.shape.empty() ? 1 : static_cast<size_t>(output.shape[0].constant());
  std::vector<Dim> result;
  for (size_t at = 0; at < length; ++at) {
    std::vector<Dim> operands;
    for (size_t i = 0; i < context.num_inputs(); ++i) {
      if (!context.has_input(i)) continue;
      const std::vector<Dim>& contents = *context.known(i);
      operands.push_back(contents[contents.size() == 1 ? 0 : at]);
    }
    try {
      std::optional<Dim> value = element(operands);
      if (!value) return;
      result.push_back(std::move(*value));
    } catch (const ShapeError&) {
      return;  // beyond 64 bits, where kernels wrap
    }
  }
  context.set_known(0, std::move(result));
}

std::function<void(InferContext&)> infer_arithmetic(
    std::function<std::optional<Dim>(std::span<const Dim>)> element) {
  return [element = std::move(element)](InferContext& context) {
    infer_broadcast(context);
    infer_contents(context, element);
  };
}

bool provably_nonnegative(const Dim& dim) {
  if (dim.is_constant()) return dim.constant() >= 0;
  // Without a minus sign the text is a sum of products of extents and of functions of extents that
  // keep the sign (floordiv, min, max, broadcast).
  return dim.str().find('-') == std::string::npos;
}

}  // namespace ortrain::ops
