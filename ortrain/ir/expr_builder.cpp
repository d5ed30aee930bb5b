// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/expr_builder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ortrain/base/error.h"
#include "ortrain/base/half.h"

namespace ortrain {
namespace {

bool same_instruction(const ExprInstruction& a, const ExprInstruction& b) {
  // Bits, not values: 0 and -0 differ, NaN equals itself.
  return a.op == b.op && a.dtype == b.dtype && a.operands == b.operands &&
         std::memcmp(&a.number, &b.number, sizeof(double)) == 0 && a.integer == b.integer;
}

DType result_type(const ExprOpInfo& info, DType first, DType second) {
  switch (info.typing) {
    case ExprTyping::compare:
    case ExprTyping::mask:
      return DType::boolean;
    case ExprTyping::select:
      return second;
    default:
      return first;
  }
}

}  // namespace

DType ExprBuilder::type(ExprReg reg) const {
  return expr_register_type(code_.at(static_cast<size_t>(reg)).dtype);
}

ExprReg ExprBuilder::append(ExprInstruction instruction) {
  // Each is compared with all before; a node may list any number of inputs.
  if (code_.size() >= ExprProgram::kMaxInstructions) {
    throw InvalidModelError(
        str("more than ", ExprProgram::kMaxInstructions, " instructions for one expression"));
  }
  if (instruction.op != ExprOp::input) {
    for (size_t i = 0; i < code_.size(); ++i) {
      if (same_instruction(code_[i], instruction)) return static_cast<ExprReg>(i);
    }
  }
  code_.push_back(instruction);
  return static_cast<ExprReg>(code_.size() - 1);
}

ExprReg ExprBuilder::input(DType storage, bool per_row) {
  return append({.op = ExprOp::input, .dtype = storage, .per_row = per_row});
}

ExprReg ExprBuilder::constant(DType type, double value) {
  type = expr_register_type(type);
  if (!is_float(type)) return int_constant(type, static_cast<int64_t>(value));
  return append({.op = ExprOp::constant, .dtype = type, .number = value});
}

ExprReg ExprBuilder::int_constant(DType type, int64_t value) {
  check(!is_float(type), "an integer constant has an integer type");
  return append({.op = ExprOp::constant, .dtype = type, .integer = value});
}

ExprReg ExprBuilder::emit(ExprOp op, std::initializer_list<ExprReg> operands) {
  const ExprOpInfo& info = expr_op_info(op);
  check(static_cast<int>(operands.size()) == info.operands, "wrong number of operands");
  ExprInstruction instruction{.op = op};
  std::copy(operands.begin(), operands.end(), instruction.operands.begin());
  const DType first = type(instruction.operands[0]);
  const DType second = info.operands > 1 ? type(instruction.operands[1]) : first;
  instruction.dtype = result_type(info, first, second);
  return append(instruction);
}

ExprReg ExprBuilder::cast(ExprReg a, DType to) {
  to = expr_register_type(to);
  if (type(a) == to) return a;
  return append({.op = ExprOp::cast, .dtype = to, .operands = {a, kNoExprReg, kNoExprReg}});
}

ExprReg ExprBuilder::convert(ExprReg a, DType storage) {
  const ExprReg cast_register = cast(a, storage);
  if (storage == DType::bf16) return emit(ExprOp::to_bf16, {cast_register});
  if (storage == DType::f16) return emit(ExprOp::to_f16, {cast_register});
  return cast_register;
}

ExprReg ExprBuilder::dropout(ExprReg x, ExprReg seed, double ratio, int64_t stream) {
  return append({.op = ExprOp::dropout,
                 .dtype = type(x),
                 .operands = {x, seed, kNoExprReg},
                 .number = ratio,
                 .integer = stream});
}

ExprReg ExprBuilder::dropout_mask(ExprReg seed, double ratio, int64_t stream) {
  return append({.op = ExprOp::dropout_mask,
                 .dtype = DType::boolean,
                 .operands = {seed, kNoExprReg, kNoExprReg},
                 .number = ratio,
                 .integer = stream});
}

void ExprBuilder::output(ExprReg reg, DType storage) {
  // The store rounds anyway.
  const ExprOp rounding = storage == DType::bf16 ? ExprOp::to_bf16 : ExprOp::to_f16;
  const ExprInstruction& instruction = code_.at(static_cast<size_t>(reg));
  if (expr_register_type(storage) != storage && instruction.op == rounding) {
    reg = instruction.operands[0];
  }
  outputs_.push_back({reg, storage});
}

ExprProgram ExprBuilder::finish() const {
  std::vector<bool> needed(code_.size(), false);
  for (const ExprOutput& output : outputs_) needed[static_cast<size_t>(output.reg)] = true;
  for (size_t i = code_.size(); i-- > 0;) {
    if (code_[i].op == ExprOp::input) needed[i] = true;
    if (!needed[i]) continue;
    for (int k = 0; k < expr_op_info(code_[i].op).operands; ++k) {
      needed[static_cast<size_t>(code_[i].operands[static_cast<size_t>(k)])] = true;
    }
  }
  ExprProgram program;
  std::vector<ExprReg> moved(code_.size(), kNoExprReg);
  for (const bool inputs : {true, false}) {
    for (size_t i = 0; i < code_.size(); ++i) {
      if (!needed[i] || (code_[i].op == ExprOp::input) != inputs) continue;
      ExprInstruction instruction = code_[i];
      for (int k = 0; k < expr_op_info(instruction.op).operands; ++k) {
        ExprReg& operand = instruction.operands[static_cast<size_t>(k)];
        operand = moved[static_cast<size_t>(operand)];
      }
      moved[i] = static_cast<ExprReg>(program.code.size());
      program.code.push_back(instruction);
    }
  }
  for (const ExprOutput& output : outputs_) {
    program.outputs.push_back({moved[static_cast<size_t>(output.reg)], output.dtype});
  }
  program.validate();
  return program;
}

ExprReg ExprEmitter::number(double value) const {
  return builder_->constant(builder_->type(input(0)), value);
}

}  // namespace ortrain
