// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include "ortrain/cpu/simd/row_ops.h"
#include "ortrain/ops/loss/label_rows.h"

namespace ortrain::cpu {

// loss = (1 - s) w[y] (lse - x[y]) + s / C sum_c w[c] (lse - x[c]), s = label smoothing; the mean
// divides by the sum of w[y].
struct CrossEntropyConfig {
  ops::LabelRows rows;
  double smoothing;
  bool has_weight;
  bool full_loss = false;  // the loss and its gradient are of the compute type
};

struct CrossEntropyWorkspace {
  int64_t* labels;
  double* losses;
  static ByteCount bytes(int64_t count) {
    return bytes_of<int64_t>(count) + bytes_of<double>(count);
  }
  CrossEntropyWorkspace(void* memory, int64_t count)
      : labels(static_cast<int64_t*>(memory)), losses(reinterpret_cast<double*>(labels + count)) {}
};

// The gradient: dx[k] = d (p[k] ((1 - s) w[y] + s W / C) - s w[k] / C - (1 - s) w[y] [k = y]),
// W = sum of all class weights, d = dloss, over the sum of w[y] for the mean.

template <class T>
struct CrossEntropyGradRun {
  const CrossEntropyConfig& c;
  const KernelArgs& args;
  const int64_t* labels;
  const T* weight;
  double total_weight;  // W
  double normalizer;
  bool has_lse;

  CrossEntropyGradRun(const CrossEntropyConfig& c, const KernelArgs& args, bool has_lse)
      : c(c), args(args), has_lse(has_lse) {
    const CrossEntropyWorkspace work(args.workspace, c.rows.count());
    c.rows.read_labels(args.in[2], work.labels);
    labels = work.labels;
    weight = c.has_weight ? args.input<T>(4) : nullptr;
    const int64_t classes = c.rows.split.size;
    total_weight = static_cast<double>(classes);
    if (weight != nullptr) {
      total_weight = 0;
      for (int64_t k = 0; k < classes; ++k) total_weight += static_cast<double>(weight[k]);
    }
    normalizer =
        c.rows.reduction == ops::Reduction::mean ? ops::weight_sum(c.rows, labels, weight) : 1.0;
  }

  double upstream(int64_t i) const {
    const int64_t at = c.rows.reduction == ops::Reduction::none ? i : 0;
    const double dloss = c.full_loss ? static_cast<double>(args.input<ComputeType<T>>(0)[at])
                                     : static_cast<double>(args.input<T>(0)[at]);
    return dloss / normalizer;
  }
  double hit(int64_t i) const {
    const double w = weight == nullptr ? 1.0 : static_cast<double>(weight[labels[i]]);
    return (1.0 - c.smoothing) * w * upstream(i);
  }
  // s / C of the upstream gradient.
  double spread(int64_t i) const {
    return c.smoothing / static_cast<double>(c.rows.split.size) * upstream(i);
  }

  bool smooths_by_weight() const { return c.smoothing > 0.0 && weight != nullptr; }

  // The gradient of the contiguous scores `x` of label i, one that counts; `weights` are the class
  // weights where smooths_by_weight(). dx may be x.
  void row(const RowOps<ComputeType<T>>& ops, int64_t i, const ComputeType<T>* x,
           const ComputeType<T>* weights, ComputeType<T>* dx) const {
    using C = ComputeType<T>;
    const int64_t n = c.rows.split.size;
    C lse;
    if (has_lse) {
      lse = args.input<C>(3)[i];
    } else {
      const C max = ops.max(x, n);
      lse = max + std::log(ops.sum_exp_shifted(max, x, n));
    }
    const double hit_value = hit(i);
    const double spread_value = spread(i);
    ops.exp_affine(static_cast<C>(hit_value + spread_value * total_weight), lse,
                   weights == nullptr ? static_cast<C>(-spread_value) : C{0}, x, dx, n);
    if (weights != nullptr) ops.axpy(static_cast<C>(-spread_value), weights, dx, n);
    dx[labels[i]] -= static_cast<C>(hit_value);
  }
};

}  // namespace ortrain::cpu
