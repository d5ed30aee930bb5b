// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/interpreted_translation.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "ortrain/base/dtype_dispatch.h"

namespace ortrain::gpu::interpreted {
namespace {

Machine machine_of(DType type) {
  if (type == DType::f64) return Machine::f64;
  if (is_float(type)) return Machine::f32;
  return is_signed_integer(type) || type == DType::boolean ? Machine::i64 : Machine::u64;
}

int64_t bits_of(DType type, double number, int64_t integer) {
  int64_t bits = 0;
  if (type == DType::f64) {
    std::memcpy(&bits, &number, sizeof(number));
  } else if (type == DType::f32) {
    const float narrow = static_cast<float>(number);
    std::memcpy(&bits, &narrow, sizeof(narrow));
  } else {
    dispatch_all(type, [&](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (std::is_integral_v<T>) {
        bits = static_cast<int64_t>(static_cast<T>(integer));
      }
    });
  }
  return bits;
}
int64_t constant_bits(const ExprInstruction& instruction) {
  return bits_of(instruction.dtype, instruction.number, instruction.integer);
}
// What changes nothing.
int64_t neutral_bits(const ExprInstruction& instruction) {
  if (instruction.op != ExprOp::row_max && instruction.op != ExprOp::row_min) return 0;
  const bool lowest = instruction.op == ExprOp::row_max;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (is_float(instruction.dtype)) {
    return bits_of(instruction.dtype, lowest ? -kInfinity : kInfinity, 0);
  }
  int64_t bits = 0;
  dispatch_all(instruction.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_integral_v<T>) {
      bits = static_cast<int64_t>(lowest ? std::numeric_limits<T>::lowest()
                                         : std::numeric_limits<T>::max());
    }
  });
  return bits;
}

}  // namespace

Translation::Translation(const ExprProgram& program, std::vector<Dims> inputs)
    : axes(device_axes(program, std::move(inputs), rows)),
      program_(program),
      schedule_(program, axes) {
  translate();
}

void Translation::translate() {
  slot_of_.assign(program_.code.size(), 0);
  if (!rows) {
    DevicePass pass{0, 0, 0, -1};
    std::vector<ExprReg> all;
    for (size_t i = 0; i < program_.code.size(); ++i) {
      if (schedule_.needed[i]) all.push_back(static_cast<ExprReg>(i));
    }
    std::vector<ExprReg> read;
    for (const ExprOutput& output : program_.outputs) read.push_back(output.reg);
    append_elements(all, read, 1);
    pass.end = static_cast<int>(steps.size());
    passes.push_back(pass);
  } else {
    // What lasts for a row has a slot of its own, the rest of each pass shares those behind.
    for (size_t i = 0; i < program_.code.size(); ++i) {
      if (schedule_.needed[i] && lasts(static_cast<ExprReg>(i))) {
        slot_of_[i] = static_cast<uint16_t>(slots_used++);
      }
    }
    const int shared = slots_used;
    for (int p = 0; p < schedule_.passes; ++p) append_pass(p, shared);
  }
  const std::vector<ExprExtent> declared = program_.extents();
  for (const ExprOutput& output : program_.outputs) {
    results.push_back({slot_of_[at(output.reg)], output.dtype,
                       rows && declared[at(output.reg)] != ExprExtent::full});
  }
}

void Translation::append_pass(int p, int shared) {
  const int first_of_row = static_cast<int>(steps.size());
  for (size_t i = 0; i < program_.code.size(); ++i) {
    const auto reg = static_cast<ExprReg>(i);
    if (schedule_.needed[i] && lasts(reg) && !is_reduction(program_.code[i].op) &&
        schedule_.pass_of[i] == p) {
      append(reg);
    }
  }
  int first = first_of_row;
  // One reduction at a time.
  for (const ExprReg reduction : schedule_.reductions[static_cast<size_t>(p)]) {
    append_loop(first, schedule_.elements[static_cast<size_t>(p)],
                {program_.code[at(reduction)].operands[0]}, shared);
    passes.back().reduction = static_cast<int>(steps.size());
    append(reduction);
    first = static_cast<int>(steps.size());
  }
  if (p != schedule_.passes - 1) return;
  std::vector<ExprReg> read;
  for (const ExprOutput& output : program_.outputs) read.push_back(output.reg);
  append_loop(first, schedule_.elements[static_cast<size_t>(p)], read, shared);
}

void Translation::append_loop(int first_of_row, const std::vector<ExprReg>& list,
                              const std::vector<ExprReg>& read, int shared) {
  const int first_of_element = static_cast<int>(steps.size());
  append_elements(list, read, shared);
  passes.push_back({first_of_row, first_of_element, static_cast<int>(steps.size()), -1});
}

void Translation::append_elements(const std::vector<ExprReg>& list,
                                  const std::vector<ExprReg>& read, int shared) {
  std::vector<size_t> last_use(program_.code.size(), 0);
  std::vector<bool> wanted(program_.code.size(), false);
  for (const ExprReg reg : read) {
    wanted[at(reg)] = true;
    last_use[at(reg)] = program_.code.size();
  }
  for (size_t n = list.size(); n-- > 0;) {
    const size_t i = at(list[n]);
    if (!wanted[i]) continue;
    for (int k = 0; k < expr_op_info(program_.code[i].op).operands; ++k) {
      const size_t operand = at(program_.code[i].operands[static_cast<size_t>(k)]);
      wanted[operand] = true;
      last_use[operand] = std::max(last_use[operand], i);
    }
  }
  std::vector<uint16_t> free;
  int next = shared;
  std::vector<size_t> live;
  for (const ExprReg reg : list) {
    const size_t i = at(reg);
    if (!wanted[i]) continue;
    std::erase_if(live, [&](size_t other) {
      if (last_use[other] >= i) return false;
      free.push_back(slot_of_[other]);
      return true;
    });
    if (free.empty()) {
      slot_of_[i] = static_cast<uint16_t>(next++);
    } else {
      slot_of_[i] = free.back();
      free.pop_back();
    }
    live.push_back(i);
    append(reg);
  }
  slots_used = std::max(slots_used, next);
}

void Translation::append(ExprReg reg) {
  const ExprInstruction& instruction = program_.code[at(reg)];
  DeviceStep step{};
  step.op = instruction.op;
  step.type = instruction.dtype;
  step.machine = machine_of(instruction.dtype);
  step.operand = step.machine;
  step.result = slot_of_[at(reg)];
  step.tensor = static_cast<uint16_t>(reg);
  step.number = instruction.number;
  step.integer = instruction.integer;
  for (int k = 0; k < expr_op_info(instruction.op).operands; ++k) {
    step.operands[k] = slot_of_[at(instruction.operands[static_cast<size_t>(k)])];
  }
  if (expr_op_info(instruction.op).operands > 0) {
    step.operand = machine_of(program_.register_type(instruction.operands[0]));
  }
  if (instruction.op == ExprOp::constant) step.integer = constant_bits(instruction);
  if (is_reduction(instruction.op)) step.integer = neutral_bits(instruction);
  steps.push_back(step);
}

}  // namespace ortrain::gpu::interpreted
