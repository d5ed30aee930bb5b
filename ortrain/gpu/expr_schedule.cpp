// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/expr_schedule.h"

#include <algorithm>
#include <limits>

#include "ortrain/ir/expr_interpreter.h"

namespace ortrain::gpu {
namespace {

size_t index(ExprReg reg) { return static_cast<size_t>(reg); }

template <typename Body>
void for_each_operand(const ExprInstruction& instruction, const Body& body) {
  for (int k = 0; k < expr_op_info(instruction.op).operands; ++k) {
    body(instruction.operands[static_cast<size_t>(k)]);
  }
}

ExprExtent input_extent(const Dims& strides) {
  if (strides.back() != 0) return ExprExtent::full;
  const bool fixed = std::ranges::all_of(strides, [](int64_t stride) { return stride == 0; });
  return fixed ? ExprExtent::scalar : ExprExtent::per_row;
}

}  // namespace

bool draws(ExprOp op) { return op == ExprOp::dropout || op == ExprOp::dropout_mask; }

ExprReg seed_of(const ExprInstruction& draw) {
  return draw.operands[draw.op == ExprOp::dropout ? 1 : 0];
}

ExprSchedule::ExprSchedule(const ExprProgram& program, const ExprAxes& axes) {
  const size_t size = program.code.size();
  needed.assign(size, false);
  for (const ExprOutput& output : program.outputs) needed[index(output.reg)] = true;
  for (size_t i = size; i-- > 0;) {
    if (!needed[i]) continue;
    for_each_operand(program.code[i], [&](ExprReg operand) { needed[index(operand)] = true; });
  }

  // The first pass that can compute a register: one behind a reduction in what it reads.
  std::vector<int> earliest(size, 0);
  for (size_t i = 0; i < size; ++i) {
    const ExprInstruction& instruction = program.code[i];
    ExprExtent extent = ExprExtent::scalar;
    for_each_operand(instruction, [&](ExprReg operand) {
      const bool reduced = is_reduction(program.code[index(operand)].op);
      earliest[i] = std::max(earliest[i], earliest[index(operand)] + (reduced ? 1 : 0));
      extent = std::max(extent, extents[index(operand)]);
    });
    if (instruction.op == ExprOp::input) extent = input_extent(axes.strides[i]);
    if (is_reduction(instruction.op)) extent = ExprExtent::per_row;
    if (draws(instruction.op)) extent = ExprExtent::full;
    extents.push_back(extent);
    if (needed[i]) passes = std::max(passes, earliest[i] + (is_reduction(instruction.op) ? 2 : 1));
  }

  // As late as its first reader allows, so that little is kept.
  pass_of.assign(size, std::numeric_limits<int>::max());
  reductions.resize(static_cast<size_t>(passes));
  for (const ExprOutput& output : program.outputs) pass_of[index(output.reg)] = passes - 1;
  for (size_t i = size; i-- > 0;) {
    if (!needed[i]) continue;
    if (is_reduction(program.code[i].op)) pass_of[i] = earliest[i];
    for_each_operand(program.code[i], [&](ExprReg operand) {
      pass_of[index(operand)] = std::min(pass_of[index(operand)], pass_of[i]);
    });
  }
  for (size_t i = 0; i < size; ++i) {
    if (needed[i] && is_reduction(program.code[i].op)) {
      reductions[static_cast<size_t>(pass_of[i])].push_back(static_cast<ExprReg>(i));
    }
  }

  std::vector<bool> is_kept(size, false);
  for (int pass = 0; pass < passes; ++pass) {
    std::vector<bool> read(size, false);
    const auto use = [&](ExprReg reg) {
      if (!is(reg, ExprExtent::full)) return;
      read[index(reg)] = true;
      if (pass_of[index(reg)] < pass) is_kept[index(reg)] = true;
    };
    for (const ExprReg reduction : reductions[static_cast<size_t>(pass)]) {
      use(program.code[index(reduction)].operands[0]);
    }
    if (pass == passes - 1) {
      for (const ExprOutput& output : program.outputs) use(output.reg);
    }
    for (size_t i = size; i-- > 0;) {
      if (!read[i]) continue;
      // What an earlier pass has kept is not computed, so what it reads is not kept for that.
      const bool computed = pass_of[i] == pass;
      for_each_operand(program.code[i], [&](ExprReg operand) {
        if (!is(operand, ExprExtent::full)) return;
        read[index(operand)] = true;
        if (computed && pass_of[index(operand)] < pass) is_kept[index(operand)] = true;
      });
    }
    std::vector<ExprReg>& list = elements.emplace_back();
    for (size_t i = 0; i < size; ++i) {
      if (read[i]) list.push_back(static_cast<ExprReg>(i));
    }
  }
  for (size_t i = 0; i < size; ++i) {
    if (is_kept[i]) kept.push_back(static_cast<ExprReg>(i));
  }
}

ExprAxes device_axes(const ExprProgram& program, std::vector<Dims> inputs, bool& rows) {
  rows = has_rows(program);
  if (rows && !program.has_reductions()) {
    const std::vector<ExprExtent> declared = program.extents();
    const bool only_rows = std::ranges::none_of(program.outputs, [&](const ExprOutput& output) {
      return declared[index(output.reg)] == ExprExtent::full;
    });
    // Values per row alone: then what varies along the row is not needed.
    if (only_rows) {
      rows = false;
      for (size_t i = 0; i < inputs.size(); ++i) {
        if (!inputs[i].empty() && inputs[i].back() != 1) inputs[i].back() = 1;
      }
    }
  }
  ExprAxes axes = merged_axes(program, inputs, rows);
  if (rows && axes.columns() <= 1) {
    // One element per row is an element: read only by the thread that writes in its place.
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (input_extent(axes.strides[i]) == ExprExtent::per_row && !program.code[i].per_row) {
        axes.strides[i].back() = 1;
      }
    }
  }
  return axes;
}

}  // namespace ortrain::gpu
