// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/optimizer.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "ortrain/base/error.h"
#include "ortrain/cpu/scratch.h"

namespace ortrain::cpu {
namespace {

// Elements widened at a time: the buffers of one step stay in the first cache.
constexpr int64_t kChunk = 1024;
constexpr int64_t kBuffers = 6;

using Piece = TensorBlocks::Piece;

// A run of elements of an operand in the type to compute in.
template <class T>
T* at(const OptimizerOperand& operand, int64_t begin) {
  return static_cast<T*>(operand.data) + begin;
}

bool is_narrow(const OptimizerOperand& operand) {
  return operand.data != nullptr && storage_size(operand.storage) == 2;
}

bool has_narrow(const OptimizerTensor& tensor) {
  return is_narrow(tensor.param) || is_narrow(tensor.grad) ||
         std::any_of(tensor.states.begin(), tensor.states.end(), is_narrow);
}

// Gives float runs of operands of any format but double: in place or through a buffer.
class FloatRuns {
 public:
  FloatRuns(int64_t begin, int64_t size)
      : buffers_(scratch<float>(ScratchSlot::kKernel, kBuffers, kChunk)),
        begin_(begin),
        size_(size) {}

  float* read(const OptimizerOperand& operand) {
    if (operand.data == nullptr) return nullptr;
    if (!is_narrow(operand)) return at<float>(operand, begin_);
    float* buffer = next();
    widen(operand.storage, at<uint16_t>(operand, begin_), buffer, size_);
    return buffer;
  }
  void write(const OptimizerOperand& operand, const float* values) const {
    if (is_narrow(operand)) narrow(operand.storage, values, at<uint16_t>(operand, begin_), size_);
  }
  float* next() { return buffers_ + kChunk * used_++; }

 private:
  float* buffers_;
  int64_t begin_, size_;
  int64_t used_ = 0;
};

template <class Fn>
void for_chunks(const Piece& piece, Fn fn) {
  for (int64_t done = 0; done < piece.size; done += kChunk) {
    fn(piece.begin + done, std::min(kChunk, piece.size - done));
  }
}

double sum_squares(const OptimizerOperand& operand, const Piece& piece) {
  if (operand.storage == Storage::kF64) {
    return sum_squares_row(at<const double>(operand, piece.begin), piece.size);
  }
  if (operand.storage == Storage::kF32) {
    return sum_squares_row(at<const float>(operand, piece.begin), piece.size);
  }
  double total = 0;
  for_chunks(piece, [&](int64_t begin, int64_t size) {
    total += sum_squares_row(FloatRuns(begin, size).read(operand), size);
  });
  return total;
}

// The step of one piece: `row(grad, param, states...)` on runs of float or double.
template <class Row>
void step_piece(const OptimizerTensor& tensor, const Piece& piece, Row row) {
  const auto direct = [&]<class T>(T*) {
    std::array<T*, 3> states;
    for (size_t i = 0; i < states.size(); ++i) {
      const OptimizerOperand& state = tensor.states[i];
      states[i] = state.data == nullptr ? nullptr : at<T>(state, piece.begin);
    }
    row(at<const T>(tensor.grad, piece.begin), at<T>(tensor.param, piece.begin), states,
        piece.size);
  };
  if (tensor.param.storage == Storage::kF64) {
    direct(static_cast<double*>(nullptr));
  } else if (!has_narrow(tensor)) {
    direct(static_cast<float*>(nullptr));
  } else {
    for_chunks(piece, [&](int64_t begin, int64_t size) {
      FloatRuns runs(begin, size);
      const float* grad = runs.read(tensor.grad);
      float* param = runs.read(tensor.param);
      std::array<float*, 3> states;
      for (size_t i = 0; i < states.size(); ++i) states[i] = runs.read(tensor.states[i]);
      row(grad, param, states, size);
      runs.write(tensor.param, param);
      for (size_t i = 0; i < states.size(); ++i) runs.write(tensor.states[i], states[i]);
    });
  }
}

template <class T>
LambNorms lamb_moments(const LambCoefficients& coefficients, const T* grad, const T* param,
                       T* exp_avg, T* exp_avg_sq, T* update, int64_t n) {
  lamb_moments_row(coefficients, grad, param, exp_avg, exp_avg_sq, update, n);
  return {sum_squares_row(param, n), sum_squares_row<T>(update, n)};
}

LambNorms lamb_moments(const OptimizerTensor& tensor, const LambCoefficients& coefficients,
                       const Piece& piece) {
  const OptimizerOperand& mean = tensor.states[0];
  const OptimizerOperand& square = tensor.states[1];
  LambNorms norms;
  for_chunks(piece, [&](int64_t begin, int64_t size) {
    LambNorms part;
    if (tensor.param.storage == Storage::kF64) {
      part = lamb_moments(coefficients, at<const double>(tensor.grad, begin),
                          at<const double>(tensor.param, begin), at<double>(mean, begin),
                          at<double>(square, begin), scratch<double>(ScratchSlot::kKernel, kChunk),
                          size);
    } else {
      FloatRuns runs(begin, size);
      const float* grad = runs.read(tensor.grad);
      const float* param = runs.read(tensor.param);
      float* exp_avg = runs.read(mean);
      float* exp_avg_sq = runs.read(square);
      part = lamb_moments<float>(coefficients, grad, param, exp_avg, exp_avg_sq, runs.next(), size);
      runs.write(mean, exp_avg);
      runs.write(square, exp_avg_sq);
    }
    norms.param += part.param;
    norms.update += part.update;
  });
  return norms;
}

}  // namespace

void TensorBlocks::assign(std::span<const OptimizerTensor> tensors) {
  const auto same_size = [](const OptimizerTensor& tensor, int64_t size) {
    return tensor.size == size;
  };
  if (std::equal(tensors.begin(), tensors.end(), sizes_.begin(), sizes_.end(), same_size)) return;
  sizes_.clear();
  pieces_.clear();
  starts_ = {0};
  int64_t room = kBlockSize;
  for (const OptimizerTensor& tensor : tensors) {
    for (int64_t begin = 0; begin < tensor.size;) {
      const int64_t size = std::min(room, tensor.size - begin);
      pieces_.push_back({static_cast<int64_t>(sizes_.size()), begin, size});
      begin += size;
      room -= size;
      if (room == 0) {
        starts_.push_back(pieces_.size());
        room = kBlockSize;
      }
    }
    sizes_.push_back(tensor.size);
  }
  if (starts_.back() != pieces_.size()) starts_.push_back(pieces_.size());
}

double gradient_norm(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks) {
  std::vector<double> sums(blocks.pieces().size());
  blocks.for_pieces([&](size_t index, const Piece& piece) {
    sums[index] = sum_squares(tensors[static_cast<size_t>(piece.tensor)].grad, piece);
  });
  double total = 0;
  for (double sum : sums) total += sum;
  return std::sqrt(total);
}

void adam_step(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks,
               std::span<const AdamCoefficients> coefficients) {
  check(tensors.size() == coefficients.size(), "one set of coefficients per tensor");
  blocks.for_pieces([&](size_t, const Piece& piece) {
    const size_t i = static_cast<size_t>(piece.tensor);
    step_piece(tensors[i], piece, [&](auto* grad, auto* param, const auto& states, int64_t size) {
      adam_row(coefficients[i], grad, param, states[0], states[1], states[2], size);
    });
  });
}

void sgd_step(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks,
              std::span<const SgdCoefficients> coefficients) {
  check(tensors.size() == coefficients.size(), "one set of coefficients per tensor");
  blocks.for_pieces([&](size_t, const Piece& piece) {
    const size_t i = static_cast<size_t>(piece.tensor);
    step_piece(tensors[i], piece, [&](auto* grad, auto* param, const auto& states, int64_t size) {
      sgd_row(coefficients[i], grad, param, states[0], size);
    });
  });
}

void adagrad_step(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks,
                  std::span<const AdagradCoefficients> coefficients) {
  check(tensors.size() == coefficients.size(), "one set of coefficients per tensor");
  blocks.for_pieces([&](size_t, const Piece& piece) {
    const size_t i = static_cast<size_t>(piece.tensor);
    step_piece(tensors[i], piece, [&](auto* grad, auto* param, const auto& states, int64_t size) {
      adagrad_row(coefficients[i], grad, param, states[0], size);
    });
  });
}

void lamb_moments(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks,
                  std::span<const LambCoefficients> coefficients, std::span<LambNorms> norms) {
  check(tensors.size() == coefficients.size(), "one set of coefficients per tensor");
  check(tensors.size() == norms.size(), "norms for each tensor");
  std::vector<LambNorms> parts(blocks.pieces().size());
  blocks.for_pieces([&](size_t index, const Piece& piece) {
    const size_t i = static_cast<size_t>(piece.tensor);
    parts[index] = lamb_moments(tensors[i], coefficients[i], piece);
  });
  std::ranges::fill(norms, LambNorms{});
  for (size_t index = 0; index < parts.size(); ++index) {
    LambNorms& norm = norms[static_cast<size_t>(blocks.pieces()[index].tensor)];
    norm.param += parts[index].param;
    norm.update += parts[index].update;
  }
}

void lamb_update(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks,
                 std::span<const LambCoefficients> coefficients, std::span<const LambNorms> norms) {
  check(tensors.size() == coefficients.size(), "one set of coefficients per tensor");
  check(tensors.size() == norms.size(), "norms for each tensor");
  blocks.for_pieces([&](size_t, const Piece& piece) {
    const size_t i = static_cast<size_t>(piece.tensor);
    const double rate = coefficients[i].lr * lamb_ratio(norms[i], coefficients[i]);
    step_piece(tensors[i], piece, [&](auto*, auto* param, const auto& states, int64_t size) {
      using T = std::remove_pointer_t<decltype(param)>;
      lamb_apply_row<T>(coefficients[i], rate, states[0], states[1], param, size);
    });
  });
}

void lamb_step(std::span<const OptimizerTensor> tensors, const TensorBlocks& blocks,
               std::span<const LambCoefficients> coefficients) {
  std::vector<LambNorms> norms(tensors.size());
  lamb_moments(tensors, blocks, coefficients, norms);
  lamb_update(tensors, blocks, coefficients, norms);
}

}  // namespace ortrain::cpu
