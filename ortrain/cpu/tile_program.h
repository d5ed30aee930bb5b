// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/dim.h"
#include "ortrain/cpu/simd/tile_ops.h"
#include "ortrain/ir/expr_program.h"

namespace ortrain::cpu {

// An expression program compiled for concrete shapes. It runs tile by tile: a tile is a piece of a
// row, or several whole rows, whose registers fit into the first-level cache. Full inputs are read
// where they lie and results written where they belong; every other register lives in a buffer of
// the workspace. Rows are reduced by one thread each, so results do not depend on the threads.
class TileProgram {
 public:
  // Why this executor cannot run `program`; nullopt if it can.
  static std::optional<std::string> why_not(const ExprProgram& program);

  TileProgram(const ExprProgram& program, const std::vector<Dims>& inputs);

  ByteCount workspace_bytes() const;
  // `workspace` is aligned to 64 bytes. An output may be an input of the same shape and type.
  void run(const void* const* inputs, void* const* outputs, void* workspace) const;

 private:
  friend class TileCompiler;

  // Where a register or a tensor is during a tile; run_range keeps one address per slot.
  struct Slot {
    enum class Kind : uint8_t {
      buffer,        // of the worker, at `offset`
      constant,      // in constants_, at `offset`
      input_fixed,   // one value
      input_flat,    // the tile itself
      input_walked,  // broadcast over some rows: found row by row
      input_rows,    // one value per row, dense
      output_flat,
      output_rows,
    };
    Kind kind = Kind::buffer;
    size_t offset = 0;
    size_t tensor = 0;  // which input or output
    size_t bytes = 4;   // of one element
  };
  struct Step {
    enum class Kind : uint8_t { apply, reduce, spread, gather_rows, gather_values, dropout, mask };
    Kind kind = Kind::apply;
    ExprExtent extent = ExprExtent::full;  // how many elements the result has
    bool one_value = false;                // spread: from one value, not from one per row
    DType type = DType::f32;
    int operands[3] = {0, 0, 0};
    int result = 0;
    TileFn function = nullptr;
    RowFn row_function = nullptr;
    double ratio = 0;
    int64_t stream = 0;
  };
  struct Tile {
    int64_t row, rows, column, columns;
  };

  int64_t num_tiles() const { return row_tiles_ * column_tiles_; }
  int64_t row_offset(size_t input, int64_t row) const;
  void run_range(int64_t begin, int64_t end, const void* const* inputs, void* const* outputs,
                 char* memory) const;
  void run_step(const Step& step, const Tile& tile, char* const* at,
                const void* const* inputs) const;

  int64_t rows_ = 1;
  int64_t columns_ = 1;
  int64_t tile_rows_ = 1;
  int64_t tile_columns_ = 1;
  int64_t row_tiles_ = 0;
  int64_t column_tiles_ = 1;
  int64_t workers_ = 1;
  Dims outer_;                 // extents behind the rows, outermost first
  std::vector<Dims> strides_;  // per input: of outer_, then of the column
  std::vector<Slot> slots_;
  std::vector<int> moving_;  // slots whose address changes from tile to tile
  std::vector<Step> once_;   // before the first tile of a range
  std::vector<Step> steps_;  // for each tile
  std::vector<uint64_t> constants_;
  size_t buffer_bytes_ = 0;
  size_t worker_bytes_ = 0;
};

}  // namespace ortrain::cpu
