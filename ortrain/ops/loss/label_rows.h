// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/row_access.h"
#include "ortrain/ops/loss/class_loss.h"
#include "ortrain/runtime/kernel.h"

namespace ortrain::ops {

// What the kernels of classification losses share: where the classes of each label lie, and which
// labels count.
struct LabelRows {
  cpu::AxisSplit split;  // size = classes; one label per (outer, inner)
  DType label_type;
  Reduction reduction;
  std::optional<int64_t> ignore_index;
  std::string context;

  LabelRows(const NodeSpec& spec, size_t scores, size_t labels)
      : split(spec.input(scores).dims, spec.input(scores).dims.size() == 1 ? 0 : 1),
        label_type(spec.input(labels).dtype),
        reduction(reduction_of(spec.attrs())),
        ignore_index(spec.attrs().optional_int("ignore_index")),
        context(spec.context()) {}

  int64_t count() const { return split.outer * split.inner; }
  // Offset of class 0 of label i; the next class lies split.inner further.
  int64_t base(int64_t i) const {
    return i / split.inner * split.size * split.inner + i % split.inner;
  }
  // Labels as int64, -1 where ignored, written to `out`. Throws IndexError for a label that names
  // no class, before any score is read.
  void read_labels(const void* labels, int64_t* out) const;
};

// Sum over the labels that count of their class weight (1 each without weights), in label order.
template <class T>
double weight_sum(const LabelRows& rows, const int64_t* labels, const T* weight) {
  double sum = 0;
  for (int64_t i = 0; i < rows.count(); ++i) {
    if (labels[i] >= 0) sum += weight == nullptr ? 1.0 : static_cast<double>(weight[labels[i]]);
  }
  return sum;
}

// losses[i] summed in order and normalized as the reduction wants; `none` stores each.
template <class T>
void reduce_losses(const LabelRows& rows, const double* losses, double weights, T* loss) {
  using C = ComputeType<T>;
  if (rows.reduction == Reduction::none) {
    for (int64_t i = 0; i < rows.count(); ++i) loss[i] = static_cast<T>(static_cast<C>(losses[i]));
    return;
  }
  double sum = 0;
  for (int64_t i = 0; i < rows.count(); ++i) sum += losses[i];
  // No label at all: 0 / 0 = NaN, as in PyTorch.
  if (rows.reduction == Reduction::mean) sum /= weights;
  loss[0] = static_cast<T>(static_cast<C>(sum));
}

}  // namespace ortrain::ops
