// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/tile_program.h"

#include <algorithm>

#include "ortrain/base/error.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/cpu/tile_compiler.h"
#include "ortrain/ir/expr_interpreter.h"

namespace ortrain::cpu {
namespace {

bool has_loop(const ExprProgram& program, const ExprInstruction& instruction) {
  const ExprOpInfo& info = expr_op_info(instruction.op);
  const DType type = instruction.dtype;
  switch (info.typing) {
    case ExprTyping::dropout:
    case ExprTyping::mask:
      return true;
    case ExprTyping::reduction:
      return tile_reduction(instruction.op, type) != nullptr;
    default:
      break;
  }
  if (instruction.op == ExprOp::input) return tile_load(type) != nullptr;
  if (instruction.op == ExprOp::constant) return tile_load(type) != nullptr;
  const DType from =
      program.register_type(instruction.operands[static_cast<size_t>(info.operands - 1)]);
  if (instruction.op == ExprOp::cast) return tile_cast(from, type) != nullptr;
  return tile_function(instruction.op, from, 0) != nullptr;
}

}  // namespace

std::optional<std::string> TileProgram::why_not(const ExprProgram& program) {
  for (const ExprInstruction& instruction : program.code) {
    if (has_loop(program, instruction)) continue;
    return str("no loop for '", expr_op_info(instruction.op).name, "' with type ",
               name_of(instruction.dtype));
  }
  for (const ExprOutput& output : program.outputs) {
    if (tile_store(output.dtype) == nullptr) return str("no store of ", name_of(output.dtype));
  }
  return std::nullopt;
}

TileProgram::TileProgram(const ExprProgram& program, const std::vector<Dims>& inputs) {
  TileCompiler(program, inputs, *this).compile();
}

ByteCount TileProgram::workspace_bytes() const { return bytes_of<char>(workers_, worker_bytes_); }

void TileProgram::run(const void* const* inputs, void* const* outputs, void* workspace) const {
  const int64_t tiles = num_tiles();
  if (tiles == 0) return;
  char* const memory = static_cast<char*>(workspace);
  parallel_for(workers_, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      const int64_t share = tiles / workers_;
      const int64_t rest = tiles % workers_;
      const int64_t first = worker * share + std::min(worker, rest);
      const int64_t last = first + share + (worker < rest ? 1 : 0);
      run_range(first, last, inputs, outputs, memory + static_cast<size_t>(worker) * worker_bytes_);
    }
  });
}

int64_t TileProgram::row_offset(size_t input, int64_t row) const {
  const Dims& strides = strides_[input];
  int64_t offset = 0;
  for (size_t axis = outer_.size(); axis-- > 0;) {
    const int64_t quotient = row / outer_[axis];
    offset += (row - quotient * outer_[axis]) * strides[axis];
    row = quotient;
  }
  return offset;
}

void TileProgram::run_range(int64_t begin, int64_t end, const void* const* inputs,
                            void* const* outputs, char* memory) const {
  char** const at = reinterpret_cast<char**>(memory);
  char* const buffers = memory + worker_bytes_ - buffer_bytes_;
  for (size_t s = 0; s < slots_.size(); ++s) {
    const Slot& slot = slots_[s];
    switch (slot.kind) {
      case Slot::Kind::buffer:
        at[s] = buffers + slot.offset;
        break;
      case Slot::Kind::constant:
        at[s] = const_cast<char*>(reinterpret_cast<const char*>(&constants_[slot.offset]));
        break;
      case Slot::Kind::input_fixed:
        at[s] = const_cast<char*>(static_cast<const char*>(inputs[slot.tensor]));
        break;
      default:
        break;
    }
  }
  for (const Step& step : once_) run_step(step, {0, tile_rows_, 0, tile_columns_}, at, inputs);

  for (int64_t index = begin; index < end; ++index) {
    Tile tile{};
    tile.row = index / column_tiles_ * tile_rows_;
    tile.rows = std::min(tile_rows_, rows_ - tile.row);
    tile.column = index % column_tiles_ * tile_columns_;
    tile.columns = std::min(tile_columns_, columns_ - tile.column);
    for (const int s : moving_) {
      const Slot& slot = slots_[static_cast<size_t>(s)];
      const bool is_output =
          slot.kind == Slot::Kind::output_flat || slot.kind == Slot::Kind::output_rows;
      int64_t offset = tile.row;  // one value per row
      if (slot.kind == Slot::Kind::input_flat || slot.kind == Slot::Kind::output_flat) {
        offset = tile.row * columns_ + tile.column;
      } else if (slot.kind == Slot::Kind::input_walked) {
        offset = row_offset(slot.tensor, tile.row) + tile.column * strides_[slot.tensor].back();
      }
      char* const base = is_output
                             ? static_cast<char*>(outputs[slot.tensor])
                             : const_cast<char*>(static_cast<const char*>(inputs[slot.tensor]));
      at[s] = base + offset * static_cast<int64_t>(slot.bytes);
    }
    for (const Step& step : steps_) run_step(step, tile, at, inputs);
  }
}

void TileProgram::run_step(const Step& step, const Tile& tile, char* const* at,
                           const void* const* inputs) const {
  const int64_t elements = tile.rows * tile.columns;
  const int64_t count = step.extent == ExprExtent::full      ? elements
                        : step.extent == ExprExtent::per_row ? tile.rows
                                                             : 1;
  char* const result = at[step.result];
  switch (step.kind) {
    case Step::Kind::apply:
      step.function(at[step.operands[0]], at[step.operands[1]], at[step.operands[2]], result,
                    count);
      return;
    case Step::Kind::reduce:
      step.row_function(at[step.operands[0]], result, tile.rows, tile.columns);
      return;
    case Step::Kind::spread:
      if (step.one_value) {
        step.row_function(at[step.operands[0]], result, 1, count);
      } else {
        step.row_function(at[step.operands[0]], result, tile.rows, tile.columns);
      }
      return;
    case Step::Kind::gather_rows:
    case Step::Kind::gather_values: {
      const size_t input = static_cast<size_t>(step.operands[0]);
      const int64_t length = step.kind == Step::Kind::gather_rows ? tile.columns : 1;
      const char* const base = static_cast<const char*>(inputs[input]);
      const int64_t bytes = static_cast<int64_t>(size_of(step.type));
      const int64_t result_bytes =
          length * static_cast<int64_t>(size_of(expr_register_type(step.type)));
      for (int64_t r = 0; r < tile.rows; ++r) {
        step.function(base + row_offset(input, tile.row + r) * bytes, nullptr, nullptr,
                      result + r * result_bytes, length);
      }
      return;
    }
    case Step::Kind::dropout:
    case Step::Kind::mask: {
      const DropoutDraw draw{
          static_cast<uint64_t>(*reinterpret_cast<const int64_t*>(at[step.operands[1]])),
          static_cast<uint64_t>(step.stream),
          static_cast<uint64_t>(tile.row * columns_ + tile.column), step.ratio};
      const char* const x = at[step.operands[0]];
      if (step.kind == Step::Kind::mask) {
        tile_dropout_mask(reinterpret_cast<bool*>(result), elements, draw);
      } else if (step.type == DType::f64) {
        tile_dropout(reinterpret_cast<const double*>(x), reinterpret_cast<double*>(result),
                     elements, draw);
      } else {
        tile_dropout(reinterpret_cast<const float*>(x), reinterpret_cast<float*>(result), elements,
                     draw);
      }
      return;
    }
  }
}

}  // namespace ortrain::cpu
