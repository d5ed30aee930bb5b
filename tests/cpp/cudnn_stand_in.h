// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/base/error.h"
#include "ortrain/gpu/cudnn.h"
#include "ortrain/gpu/simulator.h"

// In the place of cuDNN: what the engine asks for, done on host memory from the problem alone. Sums
// in double.
namespace ortrain::testing {

template <class T>
double get(const void* data, int64_t i) {
  return static_cast<double>(static_cast<ComputeType<T>>(static_cast<const T*>(data)[i]));
}
template <class T>
void put(void* data, int64_t i, double value) {
  static_cast<T*>(data)[i] = static_cast<T>(static_cast<ComputeType<T>>(value));
}

// Calls visit(x, w, y, in channel, out channel) with the places of all products of the convolution.
template <class Visit>
void visit_products(const gpu::CudnnConvolution& p, const Visit& visit) {
  const size_t rank = p.strides.size();
  const Dims x_strides = strides_of(p.x), w_strides = strides_of(p.w), y_strides = strides_of(p.y);
  const int64_t groups = p.x[1] / p.w[1], group_out = p.y[1] / groups;
  for (int64_t y = 0; y < num_elements(p.y); ++y) {
    const int64_t n = y / y_strides[0], m = y / y_strides[1] % p.y[1];
    for (int64_t k = 0; k < num_elements(p.w) / p.w[0]; ++k) {
      const int64_t w = m * w_strides[0] + k;
      const int64_t c = m / group_out * p.w[1] + k / w_strides[1];
      int64_t x = n * x_strides[0] + c * x_strides[1];
      bool inside = true;
      for (size_t i = 0; i < rank; ++i) {
        const int64_t o = y / y_strides[i + 2] % p.y[i + 2], t = k / w_strides[i + 2] % p.w[i + 2];
        const int64_t at = o * p.strides[i] + t * p.dilations[i] - p.pads_begin[i];
        inside = inside && at >= 0 && at < p.x[i + 2];
        x += at * x_strides[i + 2];
      }
      if (inside) visit(x, w, y);
    }
  }
}

template <class T>
void convolve(const gpu::CudnnConvolution& p, std::span<void* const> operands) {
  using Direction = gpu::CudnnConvolution::Direction;
  const Dims& dims = p.direction == Direction::forward ? p.y
                     : p.direction == Direction::input ? p.x
                                                       : p.w;
  std::vector<double> sums(static_cast<size_t>(num_elements(dims)));
  if (p.has_bias) {
    const int64_t size = strides_of(dims)[1];
    for (size_t i = 0; i < sums.size(); ++i) {
      sums[i] = get<T>(operands[2], static_cast<int64_t>(i) / size % dims[1]);
    }
  }
  visit_products(p, [&](int64_t x, int64_t w, int64_t y) {
    if (p.direction == Direction::forward) {
      sums[y] += get<T>(operands[0], x) * get<T>(operands[1], w);
    } else if (p.direction == Direction::input) {
      sums[x] += get<T>(operands[0], y) * get<T>(operands[1], w);
    } else {
      sums[w] += get<T>(operands[0], y) * get<T>(operands[1], x);
    }
  });
  for (size_t i = 0; i < sums.size(); ++i) {
    put<T>(operands.back(), static_cast<int64_t>(i), sums[i]);
  }
}

template <class T>
void attend(const gpu::CudnnAttention& p, std::span<void* const> operands) {
  const size_t first = p.backward ? 1 : 0;
  const void *q = operands[first], *k = operands[first + 1], *v = operands[first + 2];
  const auto at = [](const gpu::CudnnAttention::Strides& s, int64_t b, int64_t h, int64_t i) {
    return b * s[0] + h * s[1] + i * s[2];
  };
  std::vector<double> dk, dv;
  if (p.backward) {
    dk.resize(static_cast<size_t>(p.batch * p.kv_heads * p.keys * p.head_dim));
    dv.resize(static_cast<size_t>(p.batch * p.kv_heads * p.keys * p.value_dim));
  }
  for (int64_t row = 0; row < p.batch * p.heads * p.queries; ++row) {
    const int64_t i = row % p.queries, h = row / p.queries % p.heads, b = row / p.queries / p.heads,
                  g = h / (p.heads / p.kv_heads);
    const int64_t keys = p.causal ? std::min(i + 1, p.keys) : p.keys;
    std::vector<double> scores(static_cast<size_t>(keys));
    double sum = 0;
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t d = 0; d < p.head_dim; ++d) {
        scores[j] += p.scale * get<T>(q, at(p.q, b, h, i) + d) * get<T>(k, at(p.k, b, g, j) + d);
      }
      sum += std::exp(scores[j]);
    }
    const double logsumexp = p.backward ? get<float>(operands[5], row) : std::log(sum);
    for (double& score : scores) score = std::exp(score - logsumexp);
    if (!p.backward) {
      for (int64_t d = 0; d < p.value_dim; ++d) {
        double out = 0;
        for (int64_t j = 0; j < keys; ++j) out += scores[j] * get<T>(v, at(p.v, b, g, j) + d);
        put<T>(operands[3], at(p.out, b, h, i) + d, out);
      }
      if (p.keeps_logsumexp) put<float>(operands[4], row, logsumexp);
      continue;
    }
    std::vector<double> dq(static_cast<size_t>(p.head_dim));
    double delta = 0;
    for (int64_t d = 0; d < p.value_dim; ++d) {
      const int64_t o = at(p.out, b, h, i) + d;
      delta += get<T>(operands[0], o) * get<T>(operands[4], o);
    }
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t key = (b * p.kv_heads + g) * p.keys + j;
      double dscore = -delta;
      for (int64_t d = 0; d < p.value_dim; ++d) {
        const double dout = get<T>(operands[0], at(p.out, b, h, i) + d);
        dscore += dout * get<T>(v, at(p.v, b, g, j) + d);
        dv[key * p.value_dim + d] += scores[j] * dout;
      }
      dscore *= scores[j] * p.scale;
      for (int64_t d = 0; d < p.head_dim; ++d) {
        dq[d] += dscore * get<T>(k, at(p.k, b, g, j) + d);
        dk[key * p.head_dim + d] += dscore * get<T>(q, at(p.q, b, h, i) + d);
      }
    }
    for (int64_t d = 0; d < p.head_dim; ++d) put<T>(operands[6], at(p.q, b, h, i) + d, dq[d]);
  }
  if (!p.backward) return;
  for (int64_t key = 0; key < p.batch * p.kv_heads * p.keys; ++key) {
    const int64_t j = key % p.keys, g = key / p.keys % p.kv_heads, b = key / p.keys / p.kv_heads;
    for (int64_t d = 0; d < p.head_dim; ++d) {
      put<T>(operands[7], at(p.k, b, g, j) + d, dk[key * p.head_dim + d]);
    }
    for (int64_t d = 0; d < p.value_dim; ++d) {
      put<T>(operands[8], at(p.v, b, g, j) + d, dv[key * p.value_dim + d]);
    }
  }
}

// Counts its plans and runs. Refuses what `refuses` names: alignments below it, all.
class CudnnStandIn final : public gpu::Cudnn {
 public:
  size_t version() const override { return 92400; }
  std::shared_ptr<gpu::CudnnPlan> plan(const gpu::CudnnConvolution& p, std::string& why) override {
    check(!p.has_bias || (p.direction == gpu::CudnnConvolution::Direction::forward &&
                          p.alignment >= gpu::kCudnnAlignment),
          "a bias of y, at addresses for it");
    return p.alignment < least_alignment ? refuse(why) : made(p);
  }
  std::shared_ptr<gpu::CudnnPlan> plan(const gpu::CudnnAttention& p, std::string& why) override {
    return has_attention ? made(p) : refuse(why);
  }

  int64_t least_alignment = 1;
  bool has_attention = true;
  int plans = 0, runs = 0;
  int64_t last_alignment = 0;

 private:
  std::shared_ptr<gpu::CudnnPlan> refuse(std::string& why) {
    why = "the stand-in has no engine";
    return nullptr;
  }
  template <class Problem>
  std::shared_ptr<gpu::CudnnPlan> made(const Problem& p) {
    ++plans;
    return std::make_shared<Plan<Problem>>(*this, p);
  }

  template <class Problem>
  class Plan final : public gpu::CudnnPlan {
   public:
    Plan(CudnnStandIn& owner, const Problem& problem) : owner_(owner), problem_(problem) {}
    size_t workspace_bytes() const override { return 100; }
    std::string engine() const override { return "stand-in"; }
    void run(std::span<void* const> operands, void* workspace, void*) override {
      ++owner_.runs;
      check(workspace != nullptr && reinterpret_cast<uintptr_t>(workspace) % 256 == 0,
            "a workspace in its place");
      std::vector<void*> kept(operands.begin(), operands.end());
      gpu::simulator::submit([=, problem = problem_, end = static_cast<char*>(workspace) + 99] {
        *end = 1;
        dispatch_float(problem.dtype, [&]<class T>(TypeTag<T>) {
          if constexpr (std::is_same_v<Problem, gpu::CudnnConvolution>) {
            convolve<T>(problem, kept);
          } else {
            attend<T>(problem, kept);
          }
        });
      });
      if constexpr (std::is_same_v<Problem, gpu::CudnnConvolution>) {
        owner_.last_alignment = problem_.alignment;
      }
    }

   private:
    CudnnStandIn& owner_;
    Problem problem_;
  };
};

}  // namespace ortrain::testing
