// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>

#include "ortrain/ir/expr_builder.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_def.h"
#include "ortrain/ir/op_registry.h"

// What the definitions of elementwise operators share. An operator is its formula (`expression`),
// from which its kernels and fusion derive, and its gradient, built from elementwise operators.
namespace ortrain::ops {

using Expression = std::function<ExprReg(ExprEmitter&)>;
using Gradient = std::function<void(GradContext&)>;

// Operators of one operand "X" or two operands "A", "B" of type T, with result T.
OpDef unary_def(std::string name, int since, std::string summary, DTypeSet types,
                Expression expression, Gradient gradient);
OpDef unary_def(std::string name, int since, std::string summary, DTypeSet types, ExprOp op,
                Gradient gradient);
OpDef binary_def(std::string name, int since, std::string summary, DTypeSet types, ExprOp op,
                 Gradient gradient);
// Variadic: the operands are combined from left to right.
OpDef fold_def(std::string name, int since, std::string summary, DTypeSet types, ExprOp op,
               Gradient gradient);

// The same operator, which mixed precision computes in float32.
OpDef denied(OpDef def);

// The integer part of a float.
ExprReg trunc_expression(ExprEmitter& e, ExprReg x);

// The gradient is zero wherever it exists (floor, sign, ...).
void zero_gradient(GradContext& g);

// Computes the known contents of output 0 element by element from those of all inputs, broadcast
// to the output, when they are all known and the output is an integer or boolean tensor of rank
// 0 or 1. `element` returns nullopt when symbols leave the result open, and may overflow.
void infer_contents(InferContext& context,
                    const std::function<std::optional<Dim>(std::span<const Dim>)>& element);

// infer_broadcast, then infer_contents.
std::function<void(InferContext&)> infer_arithmetic(
    std::function<std::optional<Dim>(std::span<const Dim>)> element);

// Extents are never negative, so neither is a sum of products of them.
bool provably_nonnegative(const Dim& dim);

}  // namespace ortrain::ops
