// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "ortrain/base/half.h"
#include "ortrain/base/philox.h"
#include "ortrain/cpu/attention.h"
#include "ortrain/cpu/scratch.h"
#include "ortrain/cpu/threads.h"

namespace ortrain::cpu {
namespace {

// The log of a sum of exponentials, in two parts.
struct LogSum {
  double highest, log_sum;
};

// One (batch, head) of the problem, read as double.
template <class T>
class Head {
 public:
  Head(const AttentionForward& a, int64_t b, int64_t h)
      : a_(a), b_(b), h_(h), kv_(h / (a.shape.heads / a.shape.kv_heads)) {}

  static const T* row(const void* data, const AttentionStrides& s, int64_t b, int64_t h,
                      int64_t i) {
    return static_cast<const T*>(data) + b * s.batch + h * s.head + i * s.row;
  }
  const T* q(int64_t i) const { return row(a_.q, a_.q_strides, b_, h_, i); }
  const T* k(int64_t j) const { return row(a_.k, a_.k_strides, b_, kv_, j); }
  const T* v(int64_t j) const { return row(a_.v, a_.v_strides, b_, kv_, j); }
  T* out(int64_t i) const { return const_cast<T*>(row(a_.out, a_.out_strides, b_, h_, i)); }
  int64_t kv_head() const { return kv_; }
  int64_t lse_index(int64_t i) const { return a_.rows.of(b_, h_, i); }

  int64_t mask_index(int64_t i, int64_t j) const {
    return b_ * a_.mask.batch + h_ * a_.mask.head + i * a_.mask.row + j * a_.mask.col;
  }

  double score(int64_t i, int64_t j) const {
    constexpr double kNever = -std::numeric_limits<double>::infinity();
    if (a_.options.causal && j > i) return kNever;
    double dot = 0;
    for (int64_t c = 0; c < a_.shape.head_dim; ++c) {
      dot += static_cast<double>(q(i)[c]) * static_cast<double>(k(j)[c]);
    }
    dot *= a_.options.scale;
    if (a_.mask.kind == AttentionMask::Kind::kBool) {
      return static_cast<const bool*>(a_.mask.data)[mask_index(i, j)] ? dot : kNever;
    }
    if (a_.mask.kind == AttentionMask::Kind::kFloat) {
      return dot + static_cast<double>(static_cast<const T*>(a_.mask.data)[mask_index(i, j)]);
    }
    return dot;
  }

  LogSum log_sum(int64_t i) const {
    LogSum of{-std::numeric_limits<double>::infinity(), 0};
    for (int64_t j = 0; j < a_.shape.keys; ++j) of.highest = std::max(of.highest, score(i, j));
    double sum = 0;
    for (int64_t j = 0; j < a_.shape.keys; ++j) sum += std::exp(score(i, j) - of.highest);
    of.log_sum = std::log(sum);
    return of;
  }

  // 0, or the scale of what dropout keeps.
  double factor(int64_t i, int64_t j) const {
    const AttentionOptions& o = a_.options;
    if (o.dropout <= 0.0) return 1.0;
    const uint64_t index = static_cast<uint64_t>(a_.rows.draw(lse_index(i), j));
    const bool keep = philox_half(o.seed, o.stream, index) >= half_threshold(o.dropout);
    return keep ? half_scale(o.dropout) : 0.0;
  }

 private:
  const AttentionForward& a_;
  const int64_t b_, h_, kv_;
};

template <class T>
void store(const double* values, T* out, int64_t n) {
  for (int64_t c = 0; c < n; ++c) {
    if constexpr (std::is_same_v<T, double>) {
      out[c] = values[c];
    } else {
      out[c] = T(static_cast<float>(values[c]));
    }
  }
}

template <class T, class Lse>
void forward(const AttentionForward& a) {
  const AttentionShape& s = a.shape;
  parallel_blocks(s.batch * s.heads, [&](int64_t task) {
    const Head<T> head(a, task / s.heads, task % s.heads);
    double* p = scratch<double>(ScratchSlot::kAttention, s.keys + s.value_dim);
    double* sum = p + s.keys;
    for (int64_t i = 0; i < s.queries; ++i) {
      double max = -std::numeric_limits<double>::infinity();
      for (int64_t j = 0; j < s.keys; ++j) {
        p[j] = head.score(i, j);
        if (!(p[j] <= max)) max = p[j];  // NaN wins
      }
      const bool dead = max == -std::numeric_limits<double>::infinity();
      double total = 0;
      for (int64_t j = 0; j < s.keys; ++j) {
        p[j] = dead ? 0.0 : std::exp(p[j] - max);
        total += p[j];
      }
      std::fill(sum, sum + s.value_dim, 0.0);
      for (int64_t j = 0; j < s.keys; ++j) {
        const double weight = dead ? 0.0 : p[j] / total * head.factor(i, j);
        if (weight == 0.0) continue;
        for (int64_t c = 0; c < s.value_dim; ++c) {
          sum[c] += weight * static_cast<double>(head.v(j)[c]);
        }
      }
      store(sum, head.out(i), s.value_dim);
      if (a.logsumexp != nullptr) {
        static_cast<Lse*>(a.logsumexp)[head.lse_index(i)] =
            dead ? std::numeric_limits<Lse>::infinity() : static_cast<Lse>(max + std::log(total));
      }
    }
  });
}

template <class T>
T* row_of(void* data, const AttentionStrides& s, int64_t b, int64_t h, int64_t i) {
  return static_cast<T*>(data) + b * s.batch + h * s.head + i * s.row;
}

template <class T, class Lse>
void backward(const AttentionBackward& g) {
  const AttentionForward& a = g.forward;
  const AttentionShape& s = a.shape;
  const int64_t group = s.heads / std::max<int64_t>(s.kv_heads, 1);
  Lse* dmask = static_cast<Lse*>(g.dmask);
  if (dmask != nullptr) std::fill(dmask, dmask + g.mask_size, Lse{0});

  auto unit = [&](int64_t task) {
    const int64_t b = task / s.kv_heads;
    const int64_t kv = task % s.kv_heads;
    double* dk = scratch<double>(ScratchSlot::kAttention, s.keys + 1, s.head_dim + s.value_dim);
    double* dv = dk + s.keys * s.head_dim;
    double* dq = dv + s.keys * s.value_dim;
    std::fill(dk, dq, 0.0);
    for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
      const Head<T> head(a, b, h);
      for (int64_t i = 0; i < s.queries; ++i) {
        const T* dout = Head<T>::row(g.dout, g.dout_strides, b, h, i);
        double delta = 0;
        for (int64_t c = 0; c < s.value_dim; ++c) {
          delta += static_cast<double>(dout[c]) * static_cast<double>(head.out(i)[c]);
        }
        const Lse stored = static_cast<const Lse*>(a.logsumexp)[head.lse_index(i)];
        const LogSum lse = hides_sum(stored) ? head.log_sum(i) : LogSum{stored, 0};
        std::fill(dq, dq + s.head_dim, 0.0);
        for (int64_t j = 0; j < s.keys; ++j) {
          // Not by the sum of both parts, in which the second would be lost.
          const double p = std::exp(head.score(i, j) - lse.highest - lse.log_sum);
          if (p == 0.0) continue;
          const double factor = head.factor(i, j);
          double dp = 0;
          for (int64_t c = 0; c < s.value_dim; ++c) {
            dp += static_cast<double>(dout[c]) * static_cast<double>(head.v(j)[c]);
            dv[j * s.value_dim + c] += p * factor * static_cast<double>(dout[c]);
          }
          const double ds = p * (dp * factor - delta);
          if (dmask != nullptr) dmask[head.mask_index(i, j)] += static_cast<Lse>(ds);
          for (int64_t c = 0; c < s.head_dim; ++c) {
            dq[c] += ds * a.options.scale * static_cast<double>(head.k(j)[c]);
            dk[j * s.head_dim + c] += ds * a.options.scale * static_cast<double>(head.q(i)[c]);
          }
        }
        if (g.dq != nullptr) store(dq, row_of<T>(g.dq, g.dq_strides, b, h, i), s.head_dim);
      }
    }
    for (int64_t j = 0; j < s.keys; ++j) {
      if (g.dk != nullptr) {
        store(dk + j * s.head_dim, row_of<T>(g.dk, g.dk_strides, b, kv, j), s.head_dim);
      }
      if (g.dv != nullptr) {
        store(dv + j * s.value_dim, row_of<T>(g.dv, g.dv_strides, b, kv, j), s.value_dim);
      }
    }
  };
  // Units may share a part of the mask, whose gradient is then summed in this order.
  if (dmask == nullptr) {
    parallel_blocks(s.batch * s.kv_heads, unit);
  } else {
    for (int64_t task = 0; task < s.batch * s.kv_heads; ++task) unit(task);
  }
}

}  // namespace

void attention_reference(const AttentionForward& attention) {
  switch (attention.storage) {
    case Storage::kF32:
      return forward<float, float>(attention);
    case Storage::kF64:
      return forward<double, double>(attention);
    case Storage::kBF16:
      return forward<BFloat16, float>(attention);
    case Storage::kF16:
      return forward<Float16, float>(attention);
  }
}

void attention_reference(const AttentionBackward& attention) {
  switch (attention.forward.storage) {
    case Storage::kF32:
      return backward<float, float>(attention);
    case Storage::kF64:
      return backward<double, double>(attention);
    case Storage::kBF16:
      return backward<BFloat16, float>(attention);
    case Storage::kF16:
      return backward<Float16, float>(attention);
  }
}

}  // namespace ortrain::cpu
