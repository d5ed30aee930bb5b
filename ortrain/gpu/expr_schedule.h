// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "ortrain/ir/expr_axes.h"
#include "ortrain/ir/expr_program.h"

namespace ortrain::gpu {

// Whether an operation draws random numbers, and from which seed.
bool draws(ExprOp op);
ExprReg seed_of(const ExprInstruction& draw);

// The order in which a device runs an expression program over a row. Each pass goes over the row
// once; it ends with the reductions whose operands it can know, which later passes use. The last
// pass writes the outputs. A program without reductions is one pass.
struct ExprSchedule {
  ExprSchedule(const ExprProgram& program, const ExprAxes& axes);

  // Whether an output depends on the register.
  std::vector<bool> needed;
  // How far the register really varies, broadcasting included: over the elements of a row, over
  // rows, or not at all.
  std::vector<ExprExtent> extents;
  int passes = 1;
  // Per register: the pass that computes it first.
  std::vector<int> pass_of;
  // Per pass: the reductions it ends with.
  std::vector<std::vector<ExprReg>> reductions;
  // Per pass: registers with one value per element that it reads, directly or through others.
  std::vector<std::vector<ExprReg>> elements;
  // Registers with one value per element that are used in a later pass than their own.
  std::vector<ExprReg> kept;

  bool is(ExprReg reg, ExprExtent extent) const {
    return extents[static_cast<size_t>(reg)] == extent;
  }
};

// The space of a program for a device. Rows are kept where the program has rows; where it only
// knows values per row, these are the elements.
ExprAxes device_axes(const ExprProgram& program, std::vector<Dims> inputs, bool& rows);

}  // namespace ortrain::gpu
