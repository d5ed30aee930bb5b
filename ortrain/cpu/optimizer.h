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

// How Adam decays weights; the numbers are those of FusedAdam's adam_w_mode.
enum class DecayMode {
  l2 = 0,         // torch.optim.Adam: part of the gradient
  after = 1,      // the former AdamW of Hugging Face: of the updated weight
  decoupled = 2,  // torch.optim.AdamW: of the weight before the update
};

// What a rule says about a tensor, without the rate's schedule; each rule reads its own.
struct StepRule {
  double lr = 0, beta1 = 0, beta2 = 0, epsilon = 0, weight_decay = 0;
  double momentum = 0, dampening = 0;
  double ratio_min = 0, ratio_max = 0;
  double rate_decay = 0;
  bool nesterov = false, bias_correction = true;
  DecayMode decay_mode = DecayMode::decoupled;
};

// The coefficients of the step with number `step` >= 1, for gradients that are taken as they are.
AdamCoefficients adam_coefficients(const StepRule& rule, double step);
LambCoefficients lamb_coefficients(const StepRule& rule, double step);
// `first`: the buffer is made in this step.
SgdCoefficients sgd_coefficients(const StepRule& rule, bool first);
AdagradCoefficients adagrad_coefficients(const StepRule& rule, double step);

// The 2-norm of all gradients together, added up in double. NaN and infinity show.
double gradient_norm(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks);

// What gradients of norm `norm` are multiplied by so that it is at most `max_norm`; NaN for NaN.
// torch.nn.utils.clip_grad_norm_'s formula: min(1, max_norm / (norm + 1e-6)).
double clip_factor(double norm, double max_norm);

// One step on all tensors, each with its coefficients. `blocks` is made from `tensors`.
void adam_step(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks,
               std::span<const AdamCoefficients> coefficients);
void sgd_step(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks,
              std::span<const SgdCoefficients> coefficients);
void adagrad_step(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks,
                  std::span<const AdagradCoefficients> coefficients);
void lamb_step(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks,
               std::span<const LambCoefficients> coefficients);

// Squares of the norms of a parameter and of its update.
struct LambNorms {
  double param = 0;
  double update = 0;
};

// lamb_step in two parts, for tensors that are slices of the parameters: the first one moves the
// states and gives the norms of the slices, the second one takes those of the parameters and needs
// no gradients. One entry of `norms` per tensor.
void lamb_moments(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks,
                  std::span<const LambCoefficients> coefficients, std::span<LambNorms> norms);
void lamb_update(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks,
                 std::span<const LambCoefficients> coefficients, std::span<const LambNorms> norms);

}  // namespace ortrain::cpu
