// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/dim.h"
#include "ortrain/ir/expr_program.h"

namespace ortrain {

// The common shape of the inputs of `program`. Throws ShapeError if they do not broadcast, if a
// per_row input has a last extent other than 1, or a seed more than one value.
Shape expr_shape(const ExprProgram& program, const std::vector<Shape>& inputs);
// The shape of output `index`.
Shape expr_output_shape(const ExprProgram& program, const Shape& full, size_t index);

// Runs expression programs one instruction and one row at a time with scalar code: the reference
// for every other executor. Sums of rows are accumulated in double.
class ExprInterpreter {
 public:
  ExprInterpreter(ExprProgram program, std::vector<Dims> inputs);

  const Dims& dims() const { return dims_; }  // the common shape
  ByteCount workspace_bytes() const;
  // `workspace` is aligned to 8 bytes. An output may be an input of the same shape and type.
  void run(const void* const* inputs, void* const* outputs, void* workspace) const;

 private:
  struct Piece;
  void run_piece(const Piece& piece, const void* const* inputs, void* const* outputs,
                 void* workspace) const;

  ExprProgram program_;
  std::vector<ExprExtent> extents_;
  Dims dims_;
  int64_t rows_ = 1;
  int64_t columns_ = 1;
  int64_t piece_columns_ = 1;
  std::vector<Dims> strides_;  // per input, 0 where it is broadcast
};

}  // namespace ortrain
