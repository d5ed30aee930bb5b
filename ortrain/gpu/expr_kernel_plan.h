// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ortrain/gpu/expr_schedule.h"

namespace ortrain {
struct Fault;
}

namespace ortrain::gpu {

// How a generated kernel shares its work among threads.
struct ExprKernelShape {
  enum class Kind {
    elements,   // a thread takes `vector` neighbours, the grid strides over all of them
    warp_rows,  // a warp takes a row
    block_rows,
  };
  Kind kind = Kind::elements;
  int vector = 1;
  // Rows: vectors of one thread, whose values stay in registers from pass to pass; 0: rows of any
  // length, each pass reads and computes again.
  int per_thread = 0;
  unsigned most_threads = 256;  // of a block
  bool wide = false;            // indices need 64 bits
};

// An expression program for concrete shapes as a generated kernel. What the kernel is depends on
// the program, on the pattern of broadcasting and on the classes above; sizes, strides, and
// streams and seeds of random draws are arguments, so that most shapes and equal layers share a
// kernel.
class ExprKernelPlan {
 public:
  // Why no kernel is generated for this one.
  static std::optional<std::string> why_not(const ExprProgram& program,
                                            const std::vector<Dims>& inputs);

  // `vectors` = false: a kernel that reads and writes single elements, for operands at addresses
  // that no vector can have. Throws ShapeError as expr_shape does.
  ExprKernelPlan(ExprProgram program, const std::vector<Dims>& inputs, bool vectors);

  const ExprProgram& program() const { return program_; }
  const ExprAxes& axes() const { return axes_; }
  const ExprSchedule& schedule() const { return schedule_; }
  const ExprKernelShape& shape() const { return shape_; }
  // Blocks of one launch; 0: nothing to do.
  unsigned blocks() const { return blocks_; }
  unsigned threads() const { return threads_; }

  // Whether the operands lie where the kernel's vectors may.
  bool takes(const void* const* inputs, void* const* outputs) const;
  // Writes the arguments of a launch, argument_words() of them.
  void write_arguments(const void* const* inputs, void* const* outputs, Fault* fault, uint32_t step,
                       uint64_t* words) const;
  size_t argument_words() const { return words_.size(); }

  // Places among the arguments.
  size_t axis_word(size_t axis) const { return axis_words_[axis]; }
  size_t stride_word(size_t input, size_t axis) const { return stride_words_[input][axis]; }
  size_t input_word(size_t input) const { return first_input_ + input; }
  size_t output_word(size_t output) const { return first_output_ + output; }
  // Of a draw (dropout, dropout_mask): its stream among those of the program, and where it lies.
  size_t stream_index(ExprReg draw) const;
  size_t stream_word(ExprReg draw) const { return first_stream_ + stream_index(draw); }
  // Of a constant that is the seed of a draw; none of others.
  std::optional<size_t> seed_word(ExprReg constant) const;

  // Whether an input of that many values lies as the elements (or rows) themselves do.
  bool is_dense(size_t input) const { return dense_[input]; }

 private:
  void choose_shape(bool vectors);
  void place_arguments();
  void place_draws();

  ExprProgram program_;
  bool rows_ = false;
  ExprAxes axes_;
  ExprSchedule schedule_;
  ExprKernelShape shape_;
  unsigned blocks_ = 0;
  unsigned threads_ = 256;
  std::vector<bool> dense_;
  std::vector<uint64_t> words_;
  std::vector<size_t> axis_words_;
  std::vector<std::vector<size_t>> stride_words_;
  // Each once, in the order of the draws that are needed.
  std::vector<int64_t> streams_;
  std::vector<ExprReg> constant_seeds_;
  size_t first_stream_ = 0;
  size_t first_seed_ = 0;
  size_t first_input_ = 0;
  size_t first_output_ = 0;
};

// Arguments of one kernel: they fit into the 4 KiB that every device takes.
inline constexpr size_t kMostArgumentWords = 500;

}  // namespace ortrain::gpu
