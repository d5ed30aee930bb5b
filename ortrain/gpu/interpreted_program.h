// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ortrain/gpu/expr_schedule.h"
#include "ortrain/runtime/device.h"
#include "ortrain/runtime/kernel.h"

namespace ortrain::gpu {

// Runs an expression program on a device without a compiler: a thread takes one element, or a block
// one row, and reads the instructions one by one. Right for every program that why_not lets pass,
// several times slower than a generated kernel; see expr_kernel_plan.h.
class InterpretedProgram {
 public:
  static std::optional<std::string> why_not(const ExprProgram& program,
                                            const std::vector<Dims>& inputs);

  // Puts the instructions into memory of `device`. Throws ShapeError as expr_shape does.
  InterpretedProgram(const ExprProgram& program, const std::vector<Dims>& inputs, Device& device);

  // Puts the run onto the stream of `args`; addresses are those of the device. Throws DeviceError.
  void run(const void* const* inputs, void* const* outputs, const KernelArgs& args) const;

 private:
  bool rows_ = false;
  int64_t row_count_ = 0;
  int64_t columns_ = 0;
  size_t num_inputs_ = 0;
  size_t num_outputs_ = 0;
  int num_passes_ = 0;
  int rank_ = 0;
  size_t passes_at_ = 0;  // in the block, behind the steps
  size_t results_at_ = 0;
  size_t axes_at_ = 0;
  std::shared_ptr<Block> code_;
};

}  // namespace ortrain::gpu
