// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ortrain/base/dtype.h"
#include "ortrain/ir/expr_program.h"

// What an expression program is for the kernels that interpret it (interpreted_program.h).
namespace ortrain::gpu::interpreted {

// What a register is computed in: integers in 64 bits, then cut to their type.
enum class Machine : uint8_t { f32, f64, i64, u64 };

struct DeviceStep {
  ExprOp op;
  DType type;       // of the result; of an input, of its tensor
  Machine machine;  // of the result
  Machine operand;  // of the first operand
  uint16_t result;  // slots
  uint16_t operands[3];
  uint16_t tensor;  // input
  int64_t integer;  // bits of a constant, stream of dropout
  double number;    // ratio of dropout
};
static_assert(sizeof(DeviceStep) == 32);

struct DeviceResult {
  uint16_t slot;
  DType type;
  bool per_row;
};

// One pass over a row: steps before it, steps per element, and the reduction at its end.
struct DevicePass {
  int first_of_row, first_of_element, end;
  int reduction;  // index of its step; -1 in the last pass
};

}  // namespace ortrain::gpu::interpreted
