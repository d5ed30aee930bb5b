// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/elementwise/elementwise_def.h"

namespace ortrain::ops {

void register_logical(OpRegistry& registry) {
  const auto add = [&](const char* name, int since, const char* summary, DTypeSet types,
                       ExprOp op) {
    OpDef def = expr_op_info(op).operands == 1
                    ? unary_def(name, since, summary, types, op, nullptr)
                    : binary_def(name, since, summary, types, op, nullptr);
    def.differentiable = false;
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
