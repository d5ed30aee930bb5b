// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/gpu/exponentials.h"
#include "ortrain/ops/loss/class_rows.cuh"

// The gradient of cross entropy by its logits:
//   dx[k] = d (p[k] ((1 - s) w[y] + s W / C) - s w[k] / C - (1 - s) w[y] [k = y]),
// W = sum of all class weights, d = dloss, over the sum of w[y] for the mean, s = label smoothing.
namespace ortrain::gpu {

template <class T>
struct ClassLossGrad {
  using C = ComputeType<T>;
  int64_t classes;
  Labels labels;
  C smoothing;
  bool each, mean;  // a dloss per label; its division by the weights
  const T* dloss;
  const C* full_dloss;  // in place of dloss
  const T *x, *weight;
  const C* logsumexp;
  const LossSums* parts;  // of the weights; null where they are known to be 1
  int64_t part_count;
  T* dx;

  ORTRAIN_DEVICE LossSums all_weights() const {
    if (parts == nullptr) return {1.0, static_cast<double>(classes)};
    return all_label_weights(parts, part_count);
  }
};

// What is the same for all classes of a label.
template <class T>
struct ClassLossSlope {
  using C = ComputeType<T>;
  int64_t label;
  C hit = 0, spread = 0, factor = 0;

  ORTRAIN_DEVICE ClassLossSlope(const ClassLossGrad<T>& a, const LossSums& weights, int64_t i,
                                int64_t label)
      : label(label) {
    if (label < 0) return;
    const int64_t at = a.each ? i : 0;
    C upstream = a.full_dloss != nullptr ? a.full_dloss[at] : static_cast<C>(a.dloss[at]);
    if (a.mean) upstream /= static_cast<C>(weights.first);
    hit = (C{1} - a.smoothing) * upstream;
    if (a.weight != nullptr) hit *= static_cast<C>(a.weight[label]);
    spread = a.smoothing / static_cast<C>(a.classes) * upstream;
    factor = hit + spread * static_cast<C>(weights.second);
  }
  ORTRAIN_DEVICE C of(const ClassLossGrad<T>& a, int64_t k, C x, C lse) const {
    C value = static_cast<C>(exp(x - lse)) * factor;
    if (a.smoothing > C{0}) {
      value -= a.weight == nullptr ? spread : spread * static_cast<C>(a.weight[k]);
    }
    return k == label ? value - hit : value;
  }
};

// The gradient `to` of the scores `from` of label i, which lie side by side; both may be the same.
// Ragged scores, before `end`, have gradients in whole packs, with zeros behind them.
template <class T, class Form>
ORTRAIN_DEVICE void class_loss_grad_row(const ClassLossGrad<T>& a, const LossSums& weights,
                                        int64_t i, const T* from, T* to, const T* end = nullptr) {
  using C = ComputeType<T>;
  const int64_t n = a.classes, label = a.labels.read(i);
  if (label < 0) {
    Form::for_each_pack(n, [&](int, int64_t column) {
      RowPack<T, Form::kWidth> zeros;
      ORTRAIN_UNROLL
      for (int j = 0; j < Form::kWidth; ++j) zeros[j] = static_cast<T>(C{0});
      store_pack<Form::kWidth>(to + column, zeros);
    });
    return;
  }
  const ClassLossSlope<T> slope(a, weights, i, label);
  RowInput<T, Form> in(from, end);
  const auto write = [&](int64_t column, RowPack<T, Form::kWidth> x, C lse) {
    ORTRAIN_UNROLL
    for (int j = 0; j < Form::kWidth; ++j) {
      x[j] = static_cast<T>(
          Form::has(column, j, n) ? slope.of(a, column + j, static_cast<C>(x[j]), lse) : C{0});
    }
    store_pack<Form::kWidth>(to + column, x);
  };
  if (a.logsumexp != nullptr) {
    const C lse = a.logsumexp[i];
    Form::for_each_pack(n, [&](int k, int64_t column) { write(column, in.first(k, column), lse); });
  } else {
    const C lse = row_exponentials<Form>(in, n).log_sum();
    Form::for_each_pack(n, [&](int k, int64_t column) { write(column, in.again(k, column), lse); });
  }
}

// What a node's attributes say about its gradient.
class ClassLossGradPlan {
 public:
  ClassLossGradPlan(const NodeSpec& spec, const ClassRows& rows, bool has_weight)
      : rows_(rows),
        smoothing_(spec.attrs().float_("label_smoothing")),
        full_(spec.attrs().int_("full_loss") != 0) {
    sums_ = rows.reduction == ops::Reduction::mean || (has_weight && smoothing_ > 0.0);
  }
  ByteCount bytes() const {
    return sums_ ? bytes_of<LossSums>(weight_parts(rows_.count())) : ByteCount();
  }
  // Inputs 0 to 2 are dloss, logits, labels; the workspace starts with bytes() for the weights.
  template <class T>
  ClassLossGrad<T> grad(const KernelArgs& args, const ComputeType<T>* logsumexp, const T* weight,
                        T* dx) const {
    return {.classes = rows_.classes,
            .labels = rows_.labels_of(args, 2),
            .smoothing = static_cast<ComputeType<T>>(smoothing_),
            .each = rows_.reduction == ops::Reduction::none,
            .mean = rows_.reduction == ops::Reduction::mean,
            .dloss = full_ ? nullptr : args.input<T>(0),
            .full_dloss = full_ ? args.input<ComputeType<T>>(0) : nullptr,
            .x = args.input<T>(1),
            .weight = weight,
            .logsumexp = logsumexp,
            .parts = sums_ ? static_cast<const LossSums*>(args.workspace) : nullptr,
            .part_count = weight_parts(rows_.count()),
            .dx = dx};
  }
  template <class T>
  void launch_weights(const KernelArgs& args, const ClassLossGrad<T>& grad) const {
    if (sums_) launch_label_weights<T>(args, rows_, grad.labels, grad.weight);
  }

 private:
  ClassRows rows_;
  double smoothing_;
  bool full_;
  bool sums_;
};

}  // namespace ortrain::gpu
