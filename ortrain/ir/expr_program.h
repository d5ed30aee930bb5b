// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ortrain/base/dtype.h"

namespace ortrain {

// Scalar operations of expression programs. One row of the table in expr_program.cpp describes
// each; expr_scalar.h defines what it computes.
enum class ExprOp : uint8_t {
  input,     // element of an input tensor, widened to its register type
  constant,  // a literal
  // --- one operand, any number
  neg,
  abs,
  sign,
  relu,
  // --- one operand, float
  exp,
  expm1,
  log,
  log1p,
  sqrt,
  rsqrt,
  reciprocal,
  tanh,
  sigmoid,
  erf,
  sin,
  cos,
  tan,
  asin,
  acos,
  atan,
  sinh,
  cosh,
  floor,
  ceil,
  round,
  to_bf16,
  to_f16,  // rounds to the nearest value of the storage type, stays float32
  // --- two operands of one numeric type
  add,
  sub,
  mul,
  div,
  fmod,
  mod,
  floor_div,
  pow,
  min,
  max,
  // --- comparisons and logic
  eq,
  ne,
  lt,
  le,
  logical_and,
  logical_or,
  logical_xor,
  logical_not,
  bit_and,
  bit_or,
  bit_xor,
  bit_not,
  // --- mixed types
  select,  // condition ? a : b
  cast,
  dropout,       // (x, seed): x / (1 - ratio) where the element is kept, else 0
  dropout_mask,  // (seed): whether the element is kept
  // --- one value per row
  row_sum,
  row_mean,
  row_max,
  row_min,
};
inline constexpr int kExprOpCount = static_cast<int>(ExprOp::row_min) + 1;

enum class ExprTyping : uint8_t {
  special,    // input, constant, cast
  number,     // operands and result of one numeric type
  real,       // operands and result of one float type
  compare,    // operands of one type, boolean result
  logic,      // booleans
  bits,       // operands and result of one integer type
  select,     // boolean, T, T -> T
  dropout,    // float T, int64 -> T
  mask,       // int64 -> boolean
  reduction,  // float or integer T, one value per element -> T, one value per row
};

struct ExprOpInfo {
  ExprOp op;
  std::string_view name;
  int operands;
  ExprTyping typing;
};
const ExprOpInfo& expr_op_info(ExprOp op);
std::optional<ExprOp> expr_op_from_name(std::string_view name);
bool is_reduction(ExprOp op);

using ExprReg = int32_t;  // index of the instruction that defines the register
inline constexpr ExprReg kNoExprReg = -1;

struct ExprInstruction {
  ExprOp op = ExprOp::constant;
  // Type of the register: never a 16-bit float. For `input` the element type of the tensor.
  DType dtype = DType::f32;
  std::array<ExprReg, 3> operands = {kNoExprReg, kNoExprReg, kNoExprReg};
  double number = 0;     // constant of a float type; ratio of dropout
  int64_t integer = 0;   // constant of an integer type or boolean; stream of dropout
  bool per_row = false;  // input: last extent 1, so that the register holds one value per row

  bool operator==(const ExprInstruction&) const = default;
};

struct ExprOutput {
  ExprReg reg = kNoExprReg;
  DType dtype = DType::f32;  // element type of the tensor; the register is rounded to it

  bool operator==(const ExprOutput&) const = default;
};

// How many values a register has: one, one per row, one per element.
enum class ExprExtent : uint8_t { scalar, per_row, full };

// Straight-line code over a space [rows, columns]: columns is the last extent of the common shape
// of the inputs (NumPy broadcasting), rows the product of the others. Registers are assigned once.
// The first instructions are the inputs. An output has the common shape, or that shape with last
// extent 1 if its register holds one value per row.
//
// 16-bit floats are widened to float32 when loaded and rounded when stored; in between nothing is
// rounded unless to_bf16 or to_f16 says so.
struct ExprProgram {
  static constexpr size_t kMaxInstructions = 4096;

  std::vector<ExprInstruction> code;
  std::vector<ExprOutput> outputs;

  size_t num_inputs() const;
  DType register_type(ExprReg reg) const;
  std::vector<ExprExtent> extents() const;
  bool has_reductions() const;
  // Why nothing runs it, though it is valid: a mean of integers, whose sum needs more bits than a
  // register has.
  std::optional<std::string> why_no_executor() const;
  // Throws InvalidModelError with the line at fault.
  void validate() const;

  // One instruction per line:
  //   expr 1
  //   %0 = input float32
  //   %1 = input bfloat16 per_row
  //   %2 = constant float32 0.5
  //   %3 = mul float32 %0 %2
  //   %4 = add float32 %3 %1
  //   output %4 bfloat16
  std::string text() const;
  // Reads what text() writes; throws InvalidModelError on anything else.
  static ExprProgram parse(std::string_view text);

  bool operator==(const ExprProgram&) const = default;
};

// float32 for 16-bit floats, otherwise `storage` itself.
DType expr_register_type(DType storage);

}  // namespace ortrain
