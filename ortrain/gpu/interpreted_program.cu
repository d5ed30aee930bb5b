// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ortrain/base/error.h"
#include "ortrain/gpu/device_code.h"
#include "ortrain/gpu/interpreted_operations.h"
#include "ortrain/gpu/interpreted_program.h"
#include "ortrain/gpu/interpreted_translation.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/reduce.h"

namespace ortrain::gpu {
namespace {

using namespace interpreted;

// Values of 8 bytes that a thread has at a time, in its local memory.
constexpr int kSlots = 64;
constexpr int kMostAddresses = 120;

// The program in device memory: pointers into one block.
struct DeviceProgram {
  const DeviceStep* steps;
  const DevicePass* passes;
  const DeviceResult* results;
  const int64_t* extents;  // of the axes, then per input its strides
  int num_passes, num_results, num_inputs, rank;
  int64_t rows, columns;
  FaultReporter faults;
};

using Addresses = DeviceArray<void*, kMostAddresses>;

ORTRAIN_DEVICE int64_t offset_of(const DeviceProgram& program, int input, int64_t row,
                                 int64_t column) {
  const int64_t* strides = program.extents + (input + 1) * program.rank;
  int64_t offset = column * strides[program.rank - 1];
  for (int axis = program.rank - 2; axis >= 0; --axis) {
    offset += row % program.extents[axis] * strides[axis];
    row /= program.extents[axis];
  }
  return offset;
}

ORTRAIN_DEVICE void run_steps(const DeviceProgram& program, int first, int end, int64_t row,
                              int64_t column, const Addresses& addresses, uint64_t* slots) {
  const DivisionReporter faults{program.faults};
  for (int i = first; i < end; ++i) {
    const DeviceStep step = program.steps[i];
    if (step.op == ExprOp::input) {
      slots[step.result] = load_element(step.type, addresses[step.tensor],
                                        offset_of(program, step.tensor, row, column));
    } else {
      run_step(step, slots, row * program.columns + column, faults);
    }
  }
}

ORTRAIN_DEVICE void store_results(const DeviceProgram& program, bool per_row, int64_t at,
                                  const Addresses& addresses, const uint64_t* slots) {
  for (int k = 0; k < program.num_results; ++k) {
    const DeviceResult result = program.results[k];
    if (result.per_row == per_row) {
      store_element(result.type, slots[result.slot], addresses[program.num_inputs + k], at);
    }
  }
}

__global__ void __launch_bounds__(kItemThreads)
    interpret_elements(DeviceProgram program, Addresses addresses) {
  const DevicePass pass = program.passes[0];
  uint64_t slots[kSlots];
  for_each_item(program.rows * program.columns, [&](int64_t i) {
    run_steps(program, pass.first_of_row, pass.end, i / program.columns, i % program.columns,
              addresses, slots);
    store_results(program, false, i, addresses, slots);
  });
}

struct Combine {
  const DeviceStep& step;
  const DivisionReporter& faults;
  ORTRAIN_DEVICE uint64_t operator()(uint64_t a, uint64_t b) const {
    return combine(step, a, b, faults);
  }
};

__global__ void __launch_bounds__(256) interpret_rows(DeviceProgram program, Addresses addresses) {
  const DivisionReporter faults{program.faults};
  uint64_t slots[kSlots];
  for (int64_t row = blockIdx.x; row < program.rows; row += gridDim.x) {
    for (int p = 0; p < program.num_passes; ++p) {
      const DevicePass pass = program.passes[p];
      run_steps(program, pass.first_of_row, pass.first_of_element, row, 0, addresses, slots);
      const bool last = pass.reduction < 0;
      const DeviceStep reduction = program.steps[last ? 0 : pass.reduction];
      uint64_t part = static_cast<uint64_t>(reduction.integer);  // what changes nothing
      for (int64_t column = threadIdx.x; column < program.columns; column += blockDim.x) {
        run_steps(program, pass.first_of_element, pass.end, row, column, addresses, slots);
        if (last) {
          store_results(program, false, row * program.columns + column, addresses, slots);
        } else {
          part = combine(reduction, part, slots[reduction.operands[0]], faults);
        }
      }
      if (last) {
        if (threadIdx.x == 0) store_results(program, true, row, addresses, slots);
        continue;
      }
      part =
          block_reduce(part, static_cast<uint64_t>(reduction.integer), Combine{reduction, faults});
      if (reduction.op == ExprOp::row_mean) {
        DeviceStep divide = reduction;
        divide.op = ExprOp::div;
        const uint64_t size = convert_from(reduction.type, program.columns);
        part = combine(divide, part, size, faults);
      }
      slots[reduction.result] = part;
    }
  }
}

}  // namespace

std::optional<std::string> InterpretedProgram::why_not(const ExprProgram& program,
                                                       const std::vector<Dims>& inputs) {
  if (auto why = program.why_no_executor()) return why;
  const size_t addresses = program.num_inputs() + program.outputs.size();
  if (addresses > kMostAddresses) {
    return str("it has ", addresses, " operands, more than ", kMostAddresses);
  }
  const int slots = Translation(program, inputs).slots_used;
  if (slots > kSlots) {
    return str("the program keeps ", slots, " values at a time, more than ", kSlots);
  }
  return std::nullopt;
}

InterpretedProgram::InterpretedProgram(const ExprProgram& program, const std::vector<Dims>& inputs,
                                       Device& device)
    : num_inputs_(program.num_inputs()), num_outputs_(program.outputs.size()) {
  const Translation translation(program, inputs);
  rows_ = translation.rows;
  row_count_ = translation.axes.rows();
  columns_ = translation.axes.columns();
  rank_ = static_cast<int>(translation.axes.extents.size());
  num_passes_ = static_cast<int>(translation.passes.size());
  Dims axes = translation.axes.extents;
  for (const Dims& strides : translation.axes.strides) {
    axes.insert(axes.end(), strides.begin(), strides.end());
  }
  std::string packed;
  const auto append = [&](const auto& values) {
    const size_t start = packed.size();
    packed.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
    packed.append((32 - packed.size() % 32) % 32, '\0');
    return start;
  };
  append(translation.steps);
  passes_at_ = append(translation.passes);
  results_at_ = append(translation.results);
  axes_at_ = append(axes);
  code_ = place_bytes(device, packed.data(), packed.size());
}

void InterpretedProgram::run(const void* const* inputs, void* const* outputs,
                             const KernelArgs& args) const {
  const char* code = static_cast<const char*>(code_->data());
  DeviceProgram program{.steps = reinterpret_cast<const DeviceStep*>(code),
                        .passes = reinterpret_cast<const DevicePass*>(code + passes_at_),
                        .results = reinterpret_cast<const DeviceResult*>(code + results_at_),
                        .extents = reinterpret_cast<const int64_t*>(code + axes_at_),
                        .num_passes = num_passes_,
                        .num_results = static_cast<int>(num_outputs_),
                        .num_inputs = static_cast<int>(num_inputs_),
                        .rank = rank_,
                        .rows = row_count_,
                        .columns = columns_,
                        .faults = FaultReporter(args)};
  Addresses addresses;
  const int first_output = static_cast<int>(num_inputs_);
  for (int i = 0; i < first_output; ++i) addresses[i] = const_cast<void*>(inputs[i]);
  for (int k = 0; k < program.num_results; ++k) addresses[first_output + k] = outputs[k];
  if (!rows_) {
    launch(interpret_elements, items(row_count_ * columns_), args.stream, program, addresses);
    return;
  }
  const LaunchShape shape{.blocks = block_count(std::min<int64_t>(row_count_, int64_t{1} << 20)),
                          .threads = row_threads(columns_, 2, 256)};
  launch(interpret_rows, shape, args.stream, program, addresses);
}

}  // namespace ortrain::gpu
