// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/optimizer.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "ortrain/cpu/simd/for_each_target.h"

namespace ortrain::cpu {
namespace {

constexpr int64_t kSizes[] = {0, 1, 7, 8, 9, 17, 1000, 1025, TensorBlocks::kBlockSize + 5};
constexpr int kSteps = 3;

// Between -1 and 1, never zero.
double number(int64_t i, int64_t seed) {
  return static_cast<double>((7919 * i + seed) % 2003) / 1001.5 - 1 + 1e-4;
}

double tolerance(Storage storage) {
  switch (storage) {
    case Storage::kF64:
      return 1e-13;
    case Storage::kF32:
      return 5e-6;
    case Storage::kF16:
      return 2e-3;
    default:
      return 1e-2;
  }
}

// Elements in one of the formats, and the same in double.
class Values {
 public:
  Values(Storage storage, int64_t n, const std::function<double(int64_t)>& value)
      : storage_(storage), bytes_(static_cast<size_t>(n * storage_size(storage)) + 64) {
    if (storage == Storage::kF64) {
      for (int64_t i = 0; i < n; ++i) at<double>()[i] = value(i);
    } else {
      std::vector<float> wide(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) wide[static_cast<size_t>(i)] = static_cast<float>(value(i));
      if (storage == Storage::kF32) {
        std::copy(wide.begin(), wide.end(), at<float>());
      } else {
        narrow(storage, wide.data(), at<uint16_t>(), n);
      }
    }
    // What lies behind must stay as it is.
    std::memset(bytes_.data() + n * storage_size(storage), 0x5A, 64);
    exact = read(n);
  }

  OptimizerOperand operand() { return {bytes_.data(), storage_}; }

  std::vector<double> read(int64_t n) {
    std::vector<double> result(static_cast<size_t>(n));
    std::vector<float> wide(static_cast<size_t>(n));
    if (storage_size(storage_) == 2) widen(storage_, at<uint16_t>(), wide.data(), n);
    for (size_t i = 0; i < result.size(); ++i) {
      result[i] = storage_ == Storage::kF64   ? at<double>()[i]
                  : storage_ == Storage::kF32 ? at<float>()[i]
                                              : wide[i];
    }
    return result;
  }

  // Goes on from the rounded values.
  void expect_close(const char* what, double slack) {
    const int64_t n = static_cast<int64_t>(exact.size());
    const std::vector<double> actual = read(n);
    const double limit = slack * tolerance(storage_);
    for (size_t i = 0; i < exact.size(); ++i) {
      if (std::abs(actual[i] - exact[i]) <= limit * std::max(1.0, std::abs(exact[i]))) continue;
      FAIL() << what << " " << i << " of " << n << ": " << actual[i] << ", not " << exact[i];
    }
    for (int64_t i = 0; i < 64; ++i) {
      ASSERT_EQ(bytes_[static_cast<size_t>(n * storage_size(storage_) + i)], 0x5A) << what;
    }
    exact = actual;
  }

  std::vector<double> exact;

 private:
  template <class T>
  T* at() {
    return reinterpret_cast<T*>(bytes_.data());
  }
  Storage storage_;
  std::vector<unsigned char> bytes_;
};

struct Tensor {
  Values param, grad;
  std::vector<Values> states;
};

// Parameters of all sizes in a format; the states are `state` where that is narrower or wider.
class List {
 public:
  List(Storage storage, Storage state, size_t states) {
    for (int64_t n : kSizes) {
      Tensor tensor{Values(storage, n, [](int64_t i) { return number(i, 10); }),
                    Values(storage, n, [](int64_t i) { return number(i, 711); }),
                    {}};
      for (size_t k = 0; k < states; ++k) {
        tensor.states.emplace_back(state, n, [](int64_t) { return 0.0; });
      }
      tensors.push_back(std::move(tensor));
    }
    for (size_t t = 0; t < tensors.size(); ++t) {
      OptimizerTensor operands;
      operands.size = kSizes[t];
      operands.param = tensors[t].param.operand();
      operands.grad = tensors[t].grad.operand();
      for (size_t k = 0; k < states; ++k) operands.states[k] = tensors[t].states[k].operand();
      list.push_back(operands);
    }
    blocks.assign(list);
  }

  void expect_close(double slack = 1) {
    for (Tensor& tensor : tensors) {
      tensor.param.expect_close("param", slack);
      tensor.grad.expect_close("grad", 0);
      for (Values& state : tensor.states) state.expect_close("state", slack);
    }
  }

  std::vector<Tensor> tensors;
  std::vector<OptimizerTensor> list;
  TensorBlocks blocks;
};

struct Formats {
  Storage param, state;
};
constexpr Formats kFormats[] = {{Storage::kF32, Storage::kF32},
                                {Storage::kF64, Storage::kF64},
                                {Storage::kBF16, Storage::kBF16},
                                {Storage::kF16, Storage::kF16},
                                {Storage::kBF16, Storage::kF32}};

void adam_reference(Tensor& tensor, const AdamCoefficients& c, bool amsgrad) {
  for (size_t i = 0; i < tensor.param.exact.size(); ++i) {
    double& p = tensor.param.exact[i];
    double& m = tensor.states[0].exact[i];
    double& v = tensor.states[1].exact[i];
    const double g = tensor.grad.exact[i] * c.gradient_factor + c.l2 * p;
    m = c.beta1 * m + (1 - c.beta1) * g;
    v = c.beta2 * v + (1 - c.beta2) * g * g;
    double square = v;
    if (amsgrad) square = tensor.states[2].exact[i] = std::max(tensor.states[2].exact[i], v);
    p = c.keep_before * p - c.step_size * m / (std::sqrt(square) * c.root_scale + c.epsilon);
    p *= c.keep_after;
  }
}

TEST(Optimizer, AdamIsItsFormula) {
  for_each_target([] {
    for (const Formats& formats : kFormats) {
      for (bool amsgrad : {false, true}) {
        for (double l2 : {0.0, 0.1}) {
          List list(formats.param, formats.state, amsgrad ? 3 : 2);
          for (int step = 1; step <= kSteps; ++step) {
            AdamCoefficients c = adam_coefficients(
                {.lr = 0.05, .beta1 = 0.8, .beta2 = 0.9, .epsilon = 1e-4, .weight_decay = 0.1},
                step);
            c.l2 = l2;
            c.keep_after = 0.99;
            c.gradient_factor = -0.7;
            adam_step(list.list, list.blocks, std::vector(list.list.size(), c));
            for (Tensor& tensor : list.tensors) adam_reference(tensor, c, amsgrad);
            list.expect_close();
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  });
}

TEST(Optimizer, AdamwCoefficients) {
  const AdamCoefficients c = adam_coefficients(
      {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .epsilon = 1e-8, .weight_decay = 0.2}, 3);
  EXPECT_NEAR(c.step_size, 0.1 / (1 - 0.9 * 0.9 * 0.9), 1e-14);
  EXPECT_NEAR(c.root_scale, 1 / std::sqrt(1 - 0.99 * 0.99 * 0.99), 1e-12);
  EXPECT_DOUBLE_EQ(c.keep_before, 0.98);
}

TEST(Optimizer, SgdIsItsFormula) {
  for_each_target([] {
    for (const Formats& formats : kFormats) {
      for (int kind = 0; kind < 6; ++kind) {
        const bool buffer = kind >= 2, nesterov = kind >= 4;
        List list(formats.param, formats.state, buffer ? 1 : 0);
        for (int step = 1; step <= kSteps; ++step) {
          const SgdCoefficients c{.lr = 0.1,
                                  .momentum = 0.9,
                                  .buffer_keep = step == 1 ? 0 : 0.9,
                                  .buffer_gain = step == 1 ? 1 : 0.8,
                                  .l2 = kind % 2 == 0 ? 0 : 0.1,
                                  .gradient_factor = 0.7,
                                  .nesterov = nesterov};
          sgd_step(list.list, list.blocks, std::vector(list.list.size(), c));
          for (Tensor& tensor : list.tensors) {
            for (size_t i = 0; i < tensor.param.exact.size(); ++i) {
              double& p = tensor.param.exact[i];
              double g = tensor.grad.exact[i] * c.gradient_factor + c.l2 * p;
              if (buffer) {
                double& b = tensor.states[0].exact[i];
                b = c.buffer_keep * b + c.buffer_gain * g;
                g = nesterov ? g + c.momentum * b : b;
              }
              p -= c.lr * g;
            }
          }
          list.expect_close();
          if (HasFatalFailure()) return;
        }
      }
    }
  });
}

void lamb_reference(Tensor& tensor, const LambCoefficients& c) {
  std::vector<double> update(tensor.param.exact.size());
  double norm_p = 0, norm_u = 0;
  for (size_t i = 0; i < update.size(); ++i) {
    double& m = tensor.states[0].exact[i];
    double& v = tensor.states[1].exact[i];
    const double p = tensor.param.exact[i];
    const double g = tensor.grad.exact[i] * c.gradient_factor;
    m = c.beta1 * m + (1 - c.beta1) * g;
    v = c.beta2 * v + (1 - c.beta2) * g * g;
    update[i] = m * c.mean_scale / (std::sqrt(v) * c.root_scale + c.epsilon) + c.weight_decay * p;
    norm_p += p * p;
    norm_u += update[i] * update[i];
  }
  double ratio = 1;
  if (norm_p != 0 && norm_u != 0) {
    ratio = std::max(std::min(std::sqrt(norm_p / norm_u), c.ratio_max), c.ratio_min);
  }
  for (size_t i = 0; i < update.size(); ++i) tensor.param.exact[i] -= c.lr * ratio * update[i];
}

TEST(Optimizer, LambIsItsFormula) {
  for_each_target([] {
    for (const Formats& formats : kFormats) {
      for (double ratio_max : {0.5, std::numeric_limits<double>::infinity()}) {
        List list(formats.param, formats.state, 2);
        for (int step = 1; step <= kSteps; ++step) {
          const LambCoefficients c{.beta1 = 0.8,
                                   .beta2 = 0.9,
                                   .epsilon = 1e-3,
                                   .lr = 0.05,
                                   .mean_scale = 1 / (1 - std::pow(0.8, step)),
                                   .root_scale = 1 / std::sqrt(1 - std::pow(0.9, step)),
                                   .weight_decay = 0.1,
                                   .ratio_min = 0.1,
                                   .ratio_max = ratio_max,
                                   .gradient_factor = 0.7};
          lamb_step(list.list, list.blocks, std::vector(list.list.size(), c));
          for (Tensor& tensor : list.tensors) lamb_reference(tensor, c);
          list.expect_close(10);  // 16-bit moments are rounded before the update is made from them
          if (HasFatalFailure()) return;
        }
      }
    }
  });
}

TEST(Optimizer, LambRatioIsOneForZeroNorms) {
  std::vector<float> param(5, 0.0f), grad(5, 1.0f), mean(5, 0.0f), square(5, 0.0f);
  const OptimizerTensor tensor{
      5, {param.data()}, {grad.data()}, {{{mean.data()}, {square.data()}}}};
  TensorBlocks blocks;
  blocks.assign({&tensor, 1});
  const LambCoefficients c{.lr = 0.5, .ratio_min = 3, .ratio_max = 4};
  lamb_step({&tensor, 1}, blocks, {&c, 1});
  const double update = 0.1 / (std::sqrt(0.001) + 1e-6);
  for (float p : param) EXPECT_NEAR(p, -0.5 * update, 1e-5);
}

TEST(Optimizer, NormOfAllGradients) {
  for_each_target([] {
    for (const Formats& formats : kFormats) {
      List list(formats.param, formats.state, 0);
      double expected = 0;
      for (const Tensor& tensor : list.tensors) {
        for (double g : tensor.grad.exact) expected += g * g;
      }
      EXPECT_NEAR(gradient_norm(list.list, list.blocks), std::sqrt(expected),
                  1e-10 * std::sqrt(expected));
    }
  });
}

TEST(Optimizer, NormIsTheSameForAnyNumberOfThreads) {
  List list(Storage::kF32, Storage::kF32, 0);
  const int before = omp_get_max_threads();
  omp_set_num_threads(1);
  const double expected = gradient_norm(list.list, list.blocks);
  for (int threads : {2, 3, 4}) {
    omp_set_num_threads(threads);
    EXPECT_EQ(gradient_norm(list.list, list.blocks), expected) << threads;
  }
  omp_set_num_threads(before);
}

TEST(Optimizer, NormShowsNanAndInfinity) {
  std::vector<float> grad(100, 1e30f);
  const OptimizerTensor tensor{100, {}, {grad.data()}, {}};
  TensorBlocks blocks;
  blocks.assign({&tensor, 1});
  EXPECT_NEAR(gradient_norm({&tensor, 1}, blocks), 1e31, 1e26);  // no overflow in between
  grad[99] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isinf(gradient_norm({&tensor, 1}, blocks)));
  grad[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(gradient_norm({&tensor, 1}, blocks)));
}

TEST(Optimizer, ClipFactor) {
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(clip_factor(0.5, 1), 1);
  EXPECT_EQ(clip_factor(0, 1), 1);
  EXPECT_DOUBLE_EQ(clip_factor(4, 1), 1 / (4 + 1e-6));
  EXPECT_EQ(clip_factor(infinity, 1), 0);
  EXPECT_TRUE(std::isnan(clip_factor(infinity, infinity)));
  EXPECT_TRUE(std::isnan(clip_factor(std::nan(""), 1)));
}

TEST(Optimizer, BlocksCoverEveryElementOnce) {
  TensorBlocks blocks;
  EXPECT_EQ(blocks.block_count(), 0);
  for (int round = 0; round < 2; ++round) {
    std::vector<OptimizerTensor> tensors;
    for (int64_t size : kSizes) tensors.push_back({.size = size + round});
    blocks.assign(tensors);
    std::vector<int64_t> next(tensors.size(), 0);
    for (const TensorBlocks::Piece& piece : blocks.pieces()) {
      EXPECT_EQ(piece.begin, next[static_cast<size_t>(piece.tensor)]);
      EXPECT_GT(piece.size, 0);
      next[static_cast<size_t>(piece.tensor)] += piece.size;
    }
    int64_t total = 0;
    for (size_t t = 0; t < tensors.size(); ++t) {
      EXPECT_EQ(next[t], tensors[t].size);
      total += tensors[t].size;
    }
    EXPECT_EQ(blocks.block_count(),
              (total + TensorBlocks::kBlockSize - 1) / TensorBlocks::kBlockSize);
  }
  blocks.assign({});
  EXPECT_EQ(blocks.block_count(), 0);
}

}  // namespace
}  // namespace ortrain::cpu
