// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "ortrain/gpu/expr_schedule.h"
#include "ortrain/gpu/interpreted_steps.h"

namespace ortrain::gpu::interpreted {

// An expression program as steps: which pass each register is computed in, and in which slot. The
// program must live as long. Throws ShapeError as expr_shape does.
class Translation {
 public:
  Translation(const ExprProgram& program, std::vector<Dims> inputs);

  bool rows = false;  // the program reduces rows, or has values of a row each
  ExprAxes axes;
  std::vector<DeviceStep> steps;
  std::vector<DevicePass> passes;
  std::vector<DeviceResult> results;
  int slots_used = 1;  // slot 0 is what absent operands name

 private:
  static size_t at(ExprReg reg) { return static_cast<size_t>(reg); }
  bool lasts(ExprReg reg) const { return schedule_.extents[at(reg)] != ExprExtent::full || !rows; }
  void translate();
  void append_pass(int p, int shared);
  void append_loop(int first_of_row, const std::vector<ExprReg>& list,
                   const std::vector<ExprReg>& read, int shared);
  // What `read` depends on among `list`, in slots from `shared` on that are used again when nobody
  // reads them any more.
  void append_elements(const std::vector<ExprReg>& list, const std::vector<ExprReg>& read,
                       int shared);
  void append(ExprReg reg);

  const ExprProgram& program_;
  ExprSchedule schedule_;
  std::vector<uint16_t> slot_of_;
};

}  // namespace ortrain::gpu::interpreted
