// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>

#include "ortrain/ops/elementwise/elementwise_def.h"

namespace ortrain::ops {
namespace {

using Contents = std::function<std::optional<Dim>(std::span<const Dim>)>;

// Of booleans, whose contents are 0 and 1; nullptr for bits of integers.
Contents contents_of(ExprOp op) {
  const auto known = [](const Dim& x) { return x.is(0) || x.is(1); };
  const auto combine = [known](auto decide) -> Contents {
    return [known, decide](std::span<const Dim> x) -> std::optional<Dim> {
      if (!std::all_of(x.begin(), x.end(), known)) return std::nullopt;
      return Dim(decide(x[0].is(1), x.back().is(1)) ? 1 : 0);
    };
  };
  switch (op) {
    case ExprOp::logical_and:
      return combine([](bool a, bool b) { return a && b; });
    case ExprOp::logical_or:
      return combine([](bool a, bool b) { return a || b; });
    case ExprOp::logical_xor:
      return combine([](bool a, bool b) { return a != b; });
    case ExprOp::logical_not:
      return combine([](bool a, bool) { return !a; });
    default:
      return nullptr;
  }
}

}  // namespace

void register_logical(OpRegistry& registry) {
  const auto add = [&](const char* name, int since, const char* summary, DTypeSet types,
                       ExprOp op) {
    OpDef def = expr_op_info(op).operands == 1
                    ? unary_def(name, since, summary, types, op, nullptr)
                    : binary_def(name, since, summary, types, op, nullptr);
    def.differentiable = false;
    if (const Contents contents = contents_of(op)) def.infer = infer_arithmetic(contents);
    registry.add(std::move(def));
  };
  add("And", 7, "Both.", kBoolTypes, ExprOp::logical_and);
  add("Or", 7, "Either or both.", kBoolTypes, ExprOp::logical_or);
  add("Xor", 7, "One, not both.", kBoolTypes, ExprOp::logical_xor);
  add("Not", 1, "The opposite.", kBoolTypes, ExprOp::logical_not);
  add("BitwiseAnd", 18, "And of each bit.", kIntegerTypes, ExprOp::bit_and);
  add("BitwiseOr", 18, "Or of each bit.", kIntegerTypes, ExprOp::bit_or);
  add("BitwiseXor", 18, "Exclusive or of each bit.", kIntegerTypes, ExprOp::bit_xor);
  add("BitwiseNot", 18, "Complement of each bit.", kIntegerTypes, ExprOp::bit_not);
}

}  // namespace ortrain::ops
