// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "ortrain/cpu/simd/optimizer_rows.h"
#include "ortrain/cpu/storage.h"
#include "ortrain/cpu/threads.h"

namespace ortrain::cpu {

// The formulas, which the GPU's steps share.
using ortrain::adagrad_coefficients;
using ortrain::adam_coefficients;
using ortrain::AdagradCoefficients;
using ortrain::AdamCoefficients;
using ortrain::clip_factor;
using ortrain::DecayMode;
using ortrain::lamb_coefficients;
using ortrain::LambCoefficients;
using ortrain::LambNorms;
using ortrain::sgd_coefficients;
using ortrain::SgdCoefficients;
using ortrain::StepRule;

struct OptimizerOperand {
  void* data = nullptr;
  Storage storage = Storage::kF32;
};

// One parameter of a multi-tensor step: `size` elements in a row of each operand. A double
// parameter has double operands; all others are computed in float and may mix float and 16-bit
// formats. The states are those of the optimizer: Adam and LAMB exp_avg, exp_avg_sq, and for
// AMSGrad max_exp_avg_sq; SGD the momentum buffer, or null; Adagrad the sum of squares.
struct OptimizerTensor {
  int64_t size = 0;
  OptimizerOperand param;
  OptimizerOperand grad;  // not written
  std::array<OptimizerOperand, 3> states;
};

// All elements of a list of tensors as one index space, cut into blocks of equal size for the
// threads. The cuts depend on the sizes alone, so sums over pieces are the same for any number of
// threads.
class TensorBlocks {
 public:
  static constexpr int64_t kBlockSize = 32768;

  struct Piece {
    int64_t tensor, begin, size;
  };

  // Does nothing where the sizes are those of the last call.
  void assign(std::span<const OptimizerTensor> tensors);

  std::span<const Piece> pieces() const { return pieces_; }
  int64_t block_count() const { return static_cast<int64_t>(starts_.size()) - 1; }

  // fn(index of the piece, piece) for all pieces, blocks in parallel.
  template <class Fn>
  void for_pieces(const Fn& fn) const {
    parallel_blocks(block_count(), [&](int64_t block) {
      const size_t end = starts_[static_cast<size_t>(block) + 1];
      for (size_t i = starts_[static_cast<size_t>(block)]; i < end; ++i) fn(i, pieces_[i]);
    });
  }

 private:
  std::vector<int64_t> sizes_;
  std::vector<Piece> pieces_;
  std::vector<size_t> starts_ = {0};  // of the blocks in pieces_, and their end
};

// The 2-norm of all gradients together, added up in double. NaN and infinity show.
double gradient_norm(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks);

// One step on all tensors, each with its coefficients. `blocks` is made from `tensors`.
void adam_step(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks,
               std::span<const AdamCoefficients> coefficients);
void sgd_step(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks,
              std::span<const SgdCoefficients> coefficients);
void adagrad_step(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks,
                  std::span<const AdagradCoefficients> coefficients);
void lamb_step(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks,
               std::span<const LambCoefficients> coefficients);

// lamb_step in two parts, for tensors that are slices of the parameters: the first one moves the
// states and gives the norms of the slices, the second one takes those of the parameters and needs
// no gradients. One entry of `norms` per tensor.
void lamb_moments(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks,
                  std::span<const LambCoefficients> coefficients, std::span<LambNorms> norms);
void lamb_update(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks,
                 std::span<const LambCoefficients> coefficients, std::span<const LambNorms> norms);

}  // namespace ortrain::cpu
