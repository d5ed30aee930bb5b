// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/tile_compiler.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/base/error.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/ir/expr_axes.h"

namespace ortrain::cpu {
namespace {

// Elements of a tile: a handful of float32 registers of this length fill a 32 KiB cache.
constexpr int64_t kTileElements = 1024;
// Without registers in between, only the overhead per tile counts.
constexpr int64_t kTileElementsSingle = 4096;
// Work below which a thread costs more than it brings, in additions of one element.
constexpr int64_t kWorkPerThread = 32768;
constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rough cost of one element, in additions.
int64_t weight_of(ExprOp op) {
  switch (op) {
    case ExprOp::exp:
    case ExprOp::expm1:
    case ExprOp::log:
    case ExprOp::log1p:
    case ExprOp::tanh:
    case ExprOp::sigmoid:
    case ExprOp::erf:
    case ExprOp::sin:
    case ExprOp::cos:
    case ExprOp::sinh:
    case ExprOp::cosh:
    case ExprOp::dropout:
    case ExprOp::dropout_mask: return 8;
    case ExprOp::pow:
    case ExprOp::tan:
    case ExprOp::asin:
    case ExprOp::acos:
    case ExprOp::atan:
    case ExprOp::mod:
    case ExprOp::fmod:
    case ExprOp::floor_div: return 40;
    default: return 1;
  }
}

}  // namespace

TileCompiler::TileCompiler(const ExprProgram& program, const std::vector<Dims>& inputs,
                           TileProgram& target)
    : program_(program), target_(target) {
  keep_rows_ = has_rows(program);
  find_axes(inputs);
}

void TileCompiler::find_axes(const std::vector<Dims>& inputs) {
  ExprAxes axes = merged_axes(program_, inputs, keep_rows_);
  target_.columns_ = axes.columns();
  target_.rows_ = axes.rows();
  axes.extents.pop_back();
  target_.outer_ = std::move(axes.extents);
  target_.strides_ = std::move(axes.strides);
}

void TileCompiler::choose_tile() {
  TileProgram& t = target_;
  int64_t instructions = 0;
  bool converts = false;
  for (size_t i = 0; i < program_.code.size(); ++i) {
    const ExprOp op = program_.code[i].op;
    if (needed_[i] && op != ExprOp::input && op != ExprOp::constant) ++instructions;
    converts = converts || program_.code[i].dtype != expr_register_type(program_.code[i].dtype);
  }
  const int64_t wanted = instructions <= 1 && !converts ? kTileElementsSingle : kTileElements;
  t.tile_columns_ = keep_rows_ ? t.columns_ : std::min(t.columns_, wanted);
  t.tile_rows_ = 1;
  if (t.tile_columns_ == t.columns_) {
    t.tile_rows_ = std::clamp<int64_t>(wanted / std::max<int64_t>(t.columns_, 1), 1,
                                       std::max<int64_t>(t.rows_, 1));
  }
  t.row_tiles_ = ceil_divide(t.rows_, t.tile_rows_);
  // A row without elements still has its sums.
  t.column_tiles_ = t.columns_ == 0 ? (keep_rows_ ? 1 : 0) : ceil_divide(t.columns_, t.tile_columns_);
}

void TileCompiler::choose_workers() {
  int64_t weight = 1;
  for (size_t i = 0; i < program_.code.size(); ++i) {
    if (needed_[i]) weight += weight_of(program_.code[i].op);
  }
  const int64_t elements = target_.rows_ * std::max<int64_t>(target_.columns_, 1);
  const int64_t useful = elements > std::numeric_limits<int64_t>::max() / weight
                             ? std::numeric_limits<int64_t>::max()
                             : elements * weight / kWorkPerThread;
  const int64_t most = std::min<int64_t>(thread_count(), target_.num_tiles());
  target_.workers_ = std::max<int64_t>(1, std::min(most, useful));
}

void TileCompiler::mark_needed() {
  needed_.assign(program_.code.size(), false);
  for (const ExprOutput& output : program_.outputs) needed_[static_cast<size_t>(output.reg)] = true;
  for (size_t i = program_.code.size(); i-- > 0;) {
    if (!needed_[i]) continue;
    for (int k = 0; k < expr_op_info(program_.code[i].op).operands; ++k) {
      const ExprReg operand = program_.code[i].operands[k];
      needed_[static_cast<size_t>(operand)] = true;
      if (code(operand).op == ExprOp::input) {
        last_read_ = std::max(last_read_, static_cast<ExprReg>(i));
      }
    }
  }
}

int TileCompiler::new_slot(Slot slot) {
  target_.slots_.push_back(slot);
  const int index = static_cast<int>(target_.slots_.size()) - 1;
  switch (slot.kind) {
    case Slot::Kind::buffer:
    case Slot::Kind::constant:
    case Slot::Kind::input_fixed: break;
    default: target_.moving_.push_back(index);
  }
  return index;
}

int TileCompiler::new_buffer(ExprExtent extent, size_t bytes, bool lasting) {
  const int slot = new_slot({.kind = Slot::Kind::buffer, .bytes = bytes});
  buffers_[slot] = {extent, lasting};
  return slot;
}

void TileCompiler::add_step(Step step, bool once) {
  (once ? target_.once_ : target_.steps_).push_back(step);
}

// Decides where an input is read from, and how many values it has.
void TileCompiler::place_input(ExprReg reg) {
  const size_t i = static_cast<size_t>(reg);
  const DType storage = code(reg).dtype;
  const size_t bytes = size_of(expr_register_type(storage));
  // An input that is also one of several outputs is copied before any output is written.
  const bool passed_on =
      program_.outputs.size() > 1 &&
      std::any_of(program_.outputs.begin(), program_.outputs.end(),
                  [reg](const ExprOutput& output) { return output.reg == reg; });
  const bool converts = passed_on || storage != expr_register_type(storage);
  const Dims& strides = target_.strides_[i];
  const Dims dense = strides_of(target_.outer_);
  const bool one_row = target_.tile_rows_ == 1;
  bool flat = strides.back() == 1 || target_.columns_ <= 1;
  bool dense_rows = true;
  bool same_rows = true;
  for (size_t axis = 0; axis < dense.size(); ++axis) {
    flat = flat && strides[axis] == dense[axis] * target_.columns_;
    dense_rows = dense_rows && strides[axis] == dense[axis];
    same_rows = same_rows && strides[axis] == 0;
  }
  const auto input_slot = [&](Slot::Kind kind) {
    return new_slot({.kind = kind, .tensor = i, .bytes = size_of(storage)});
  };
  int& slot = slot_of_[i];
  Step load{.type = storage, .function = tile_load(storage)};

  if (strides.back() == 0 && same_rows) {
    extents_[i] = ExprExtent::scalar;
    slot = input_slot(Slot::Kind::input_fixed);
    if (!converts) return;
    load.extent = ExprExtent::scalar;
    load.operands[0] = slot;
    load.result = slot = new_buffer(ExprExtent::scalar, bytes, true);
    return add_step(load, true);
  }
  if (strides.back() == 0) {
    extents_[i] = ExprExtent::per_row;
    if (dense_rows || one_row) {
      slot = input_slot(dense_rows ? Slot::Kind::input_rows : Slot::Kind::input_walked);
      if (!converts) return;
    } else {
      load.kind = Step::Kind::gather_values;
    }
    load.extent = ExprExtent::per_row;
    load.operands[0] = load.kind == Step::Kind::apply ? slot : static_cast<int>(i);
    load.result = slot = new_buffer(ExprExtent::per_row, bytes, false);
    return add_step(load, false);
  }
  extents_[i] = ExprExtent::full;
  if (flat || one_row) {
    slot = input_slot(flat ? Slot::Kind::input_flat : Slot::Kind::input_walked);
    if (!converts) return;
    load.operands[0] = slot;
  } else {
    load.kind = Step::Kind::gather_rows;
    load.operands[0] = static_cast<int>(i);
  }
  // The same row for all: filled once, since tiles of several rows start at column 0.
  const bool once = load.kind == Step::Kind::gather_rows && same_rows;
  load.result = slot = new_buffer(ExprExtent::full, bytes, once);
  add_step(load, once);
}

void TileCompiler::place_constant(ExprReg reg) {
  const ExprInstruction& instruction = code(reg);
  uint64_t word = 0;
  dispatch_all(instruction.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, ComputeType<T>>) {
      const T value = is_float(instruction.dtype) ? static_cast<T>(instruction.number)
                                                  : static_cast<T>(instruction.integer);
      std::memcpy(&word, &value, sizeof(T));
    }
  });
  extents_[static_cast<size_t>(reg)] = ExprExtent::scalar;
  slot_of_[static_cast<size_t>(reg)] = new_slot({.kind = Slot::Kind::constant,
                                                 .offset = target_.constants_.size(),
                                                 .bytes = size_of(instruction.dtype)});
  target_.constants_.push_back(word);
}

int TileCompiler::full_slot(ExprReg reg) {
  const size_t index = static_cast<size_t>(reg);
  if (extent(reg) == ExprExtent::full) return slot_of_[index];
  if (spread_of_[index] >= 0) return spread_of_[index];
  const DType type = program_.register_type(reg);
  Step step{.kind = Step::Kind::spread, .type = type, .row_function = tile_spread(type)};
  step.one_value = extent(reg) == ExprExtent::scalar;
  step.operands[0] = slot_of_[index];
  step.result = spread_of_[index] = new_buffer(ExprExtent::full, size_of(type), false);
  add_step(step, false);
  return step.result;
}

// The output itself where the register is stored as it is, and no input is read any more that the
// output might lie on; otherwise a buffer.
int TileCompiler::result_slot(ExprReg reg, ExprExtent result_extent) {
  const DType type = program_.register_type(reg);
  if (result_extent == ExprExtent::full && reg >= last_read_) {
    for (size_t k = 0; k < program_.outputs.size(); ++k) {
      const ExprOutput& output = program_.outputs[k];
      if (output.reg != reg || output.dtype != type) continue;
      return new_slot(
          {.kind = Slot::Kind::output_flat, .tensor = k, .bytes = size_of(output.dtype)});
    }
  }
  return new_buffer(result_extent, size_of(type), result_extent == ExprExtent::scalar);
}

void TileCompiler::compile_instruction(ExprReg reg) {
  const ExprInstruction& instruction = code(reg);
  const ExprOpInfo& info = expr_op_info(instruction.op);
  ExprExtent result = ExprExtent::scalar;
  for (int k = 0; k < info.operands; ++k) result = std::max(result, extent(instruction.operands[k]));

  Step step{.type = instruction.dtype};
  if (is_reduction(instruction.op)) {
    result = ExprExtent::per_row;
    step.kind = Step::Kind::reduce;
    step.operands[0] = full_slot(instruction.operands[0]);
    step.row_function = tile_reduction(instruction.op, instruction.dtype);
  } else if (info.typing == ExprTyping::dropout || info.typing == ExprTyping::mask) {
    const bool mask = info.typing == ExprTyping::mask;
    const ExprReg seed = instruction.operands[mask ? 0 : 1];
    if (extent(seed) != ExprExtent::scalar) throw ShapeError("the seed must be one value");
    result = ExprExtent::full;
    step.kind = mask ? Step::Kind::mask : Step::Kind::dropout;
    if (!mask) step.operands[0] = full_slot(instruction.operands[0]);
    step.operands[1] = slot_of_[static_cast<size_t>(seed)];
    step.ratio = instruction.number;
    step.stream = instruction.integer;
  } else {
    unsigned single = 0;
    for (int k = 0; k < info.operands; ++k) {
      const ExprReg operand = instruction.operands[k];
      const bool spread = result == ExprExtent::full && extent(operand) == ExprExtent::per_row &&
                          target_.tile_rows_ > 1;
      step.operands[k] = spread ? full_slot(operand) : slot_of_[static_cast<size_t>(operand)];
      if (!spread && extent(operand) != result) single |= 1u << k;
    }
    const DType from = program_.register_type(instruction.operands[info.operands - 1]);
    step.function = instruction.op == ExprOp::cast ? tile_cast(from, instruction.dtype)
                                                   : tile_function(instruction.op, from, single);
  }
  extents_[static_cast<size_t>(reg)] = result;
  step.extent = result;
  step.result = slot_of_[static_cast<size_t>(reg)] = result_slot(reg, result);
  add_step(step, result == ExprExtent::scalar);
}

void TileCompiler::store_outputs() {
  const std::vector<ExprExtent> declared = program_.extents();
  for (size_t k = 0; k < program_.outputs.size(); ++k) {
    const ExprOutput& output = program_.outputs[k];
    const size_t reg = static_cast<size_t>(output.reg);
    const bool full = declared[reg] == ExprExtent::full;
    int source = full ? full_slot(output.reg) : slot_of_[reg];
    const Slot& slot = target_.slots_[static_cast<size_t>(source)];
    if (slot.kind == Slot::Kind::output_flat && slot.tensor == k) continue;
    Step store{.extent = full ? ExprExtent::full : ExprExtent::per_row, .type = output.dtype};
    if (!full && extent(output.reg) == ExprExtent::scalar) {
      Step fill{.kind = Step::Kind::spread, .extent = ExprExtent::per_row, .one_value = true};
      fill.type = program_.register_type(output.reg);
      fill.row_function = tile_spread(fill.type);
      fill.operands[0] = source;
      fill.result = new_buffer(ExprExtent::per_row, size_of(fill.type), false);
      add_step(fill, false);
      source = fill.result;
    }
    store.function = tile_store(output.dtype);
    store.operands[0] = source;
    store.result = new_slot({.kind = full ? Slot::Kind::output_flat : Slot::Kind::output_rows,
                             .tensor = k,
                             .bytes = size_of(output.dtype)});
    add_step(store, false);
  }
}

void TileCompiler::assign_buffers() {
  std::map<int, size_t> last_use;
  for (size_t s = 0; s < target_.steps_.size(); ++s) {
    const Step& step = target_.steps_[s];
    const bool gathers =
        step.kind == Step::Kind::gather_rows || step.kind == Step::Kind::gather_values;
    last_use[step.result] = s;
    for (int k = 0; !gathers && k < 3; ++k) last_use[step.operands[k]] = s;
  }
  size_t offset = 0;
  const auto reserve = [&](int slot, int64_t elements) {
    target_.slots_[static_cast<size_t>(slot)].offset = offset;
    offset += aligned(static_cast<size_t>(elements) * target_.slots_[static_cast<size_t>(slot)].bytes);
  };
  const int64_t tile_elements = target_.tile_rows_ * target_.tile_columns_;
  for (const auto& [slot, buffer] : buffers_) {
    if (buffer.extent == ExprExtent::scalar) reserve(slot, 1);
    if (buffer.extent == ExprExtent::per_row) reserve(slot, target_.tile_rows_);
    if (buffer.extent == ExprExtent::full && buffer.lasting) reserve(slot, tile_elements);
  }
  // Tile buffers by element size; one is free again after its last reader, and an elementwise step
  // may write over what it reads for the last time.
  std::map<size_t, std::vector<size_t>> free;
  std::map<int, bool> placed;
  const auto is_pooled = [&](int slot) {
    auto found = buffers_.find(slot);
    return found != buffers_.end() && found->second.extent == ExprExtent::full &&
           !found->second.lasting;
  };
  for (size_t s = 0; s < target_.steps_.size(); ++s) {
    const Step& step = target_.steps_[s];
    const bool gathers =
        step.kind == Step::Kind::gather_rows || step.kind == Step::Kind::gather_values;
    Slot& result = target_.slots_[static_cast<size_t>(step.result)];
    std::vector<int> dying;
    for (int k = 0; !gathers && k < 3; ++k) {
      const int slot = step.operands[k];
      if (!is_pooled(slot) || last_use[slot] != s || slot == step.result) continue;
      if (std::find(dying.begin(), dying.end(), slot) == dying.end()) dying.push_back(slot);
    }
    const auto release = [&](bool same_size) {
      for (int slot : dying) {
        const Slot& dead = target_.slots_[static_cast<size_t>(slot)];
        const bool now = step.kind == Step::Kind::apply && dead.bytes == result.bytes;
        if (now == same_size) free[dead.bytes].push_back(dead.offset);
      }
    };
    release(true);
    if (is_pooled(step.result) && !placed[step.result]) {
      placed[step.result] = true;
      std::vector<size_t>& offsets = free[result.bytes];
      if (offsets.empty()) {
        reserve(step.result, tile_elements);
      } else {
        result.offset = offsets.back();
        offsets.pop_back();
      }
    }
    release(false);
  }
  target_.buffer_bytes_ = offset;
}

void TileCompiler::compile() {
  const size_t count = program_.code.size();
  extents_.assign(count, ExprExtent::full);
  slot_of_.assign(count, -1);
  spread_of_.assign(count, -1);
  mark_needed();
  choose_tile();
  for (size_t i = 0; i < count; ++i) {
    const ExprReg reg = static_cast<ExprReg>(i);
    if (!needed_[i]) continue;
    switch (code(reg).op) {
      case ExprOp::input: place_input(reg); break;
      case ExprOp::constant: place_constant(reg); break;
      default: compile_instruction(reg);
    }
  }
  store_outputs();
  choose_workers();
  assign_buffers();
  target_.worker_bytes_ = aligned(target_.slots_.size() * sizeof(void*)) + target_.buffer_bytes_;
}

}  // namespace ortrain::cpu
