// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/base/axis_split.h"
#include "ortrain/gpu/column_tiles.h"
#include "ortrain/ops/loss/class_loss.h"

// What the kernels of classification losses share.
namespace ortrain::gpu {

// The labels, and which of them count.
struct Labels {
  const void* at = nullptr;
  bool wide = false;  // int64, else int32
  bool ignores = false;
  int64_t ignored = 0;
  int64_t classes = 0;
  FaultReporter fault;

  // -1 where it is ignored, and where it names no class, which is reported.
  ORTRAIN_DEVICE int64_t read(int64_t i) const {
    const int64_t label =
        wide ? static_cast<const int64_t*>(at)[i] : int64_t{static_cast<const int32_t*>(at)[i]};
    if (ignores && label == ignored) return -1;
    if (label >= 0 && label < classes) return label;
    fault.report(FaultKind::label, label, i, 0, classes);
    return -1;
  }
};

// Scores as [outer, classes, inner], a label for each (outer, inner).
struct ClassRows {
  int64_t outer, classes, inner;
  ops::Reduction reduction;
  Labels labels;  // without their address

  ClassRows(const NodeSpec& spec, const Dims& scores, size_t label_input)
      : reduction(ops::reduction_of(spec.attrs())) {
    const AxisSplit split(scores, scores.size() == 1 ? 0 : 1);
    outer = split.outer;
    classes = split.size;
    inner = split.inner;
    const auto ignored = spec.attrs().optional_int("ignore_index");
    labels.wide = spec.input(label_input).dtype == DType::i64;
    labels.ignores = ignored.has_value();
    labels.ignored = ignored.value_or(0);
    labels.classes = classes;
  }
  int64_t count() const { return outer * inner; }
  ColumnTiles tiles() const { return {outer, classes, inner}; }
  Labels labels_of(const KernelArgs& args, size_t input) const {
    Labels of = labels;
    of.at = args.in[input];
    of.fault = FaultReporter(args);
    return of;
  }
};

// --- loss: sums of losses and of their weights in parts, then over the parts

using LossSums = TwoSums<double>;
inline constexpr int64_t kMostLossParts = 4096;

template <class T>
__global__ void finish_loss(const LossSums* parts, int64_t count, bool mean, T* loss) {
  LossSums sums{0, 0};
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) sums = AddBoth()(sums, parts[i]);
  sums = block_merge(sums, LossSums{0, 0}, AddBoth());
  if (threadIdx.x != 0) return;
  // No label at all: 0 / 0 = NaN, as in PyTorch.
  *loss = static_cast<T>(static_cast<ComputeType<T>>(mean ? sums.first / sums.second : sums.first));
}

template <class T>
void launch_finish_loss(const KernelArgs& args, const ClassRows& rows, int64_t parts) {
  launch(finish_loss<T>, {.threads = row_threads(parts, 4)}, args.stream,
         static_cast<const LossSums*>(args.workspace), parts,
         rows.reduction == ops::Reduction::mean, args.output<T>(0));
}

// --- gradient: the weights of the labels that count and of all classes, in parts

// Parts of the sum over `count` labels; every team of the gradient's kernel adds them up.
inline int64_t weight_parts(int64_t count) { return std::clamp<int64_t>(count / 2048, 1, 128); }

// parts[p] = {weights of labels, weights of classes}.
template <class T>
__global__ void __launch_bounds__(256)
    sum_label_weights(Labels labels, int64_t count, const T* weight, LossSums* parts) {
  LossSums sums{0, 0};
  for_each_item(count, [&](int64_t i) {
    const int64_t label = labels.read(i);
    if (label < 0) return;
    sums.first +=
        weight == nullptr ? 1.0 : static_cast<double>(static_cast<ComputeType<T>>(weight[label]));
  });
  for_each_item(labels.classes, [&](int64_t k) {
    sums.second +=
        weight == nullptr ? 1.0 : static_cast<double>(static_cast<ComputeType<T>>(weight[k]));
  });
  sums = block_merge(sums, LossSums{0, 0}, AddBoth());
  if (threadIdx.x == 0) parts[blockIdx.x] = sums;
}

template <class T>
void launch_label_weights(const KernelArgs& args, const ClassRows& rows, const Labels& labels,
                          const T* weight) {
  launch(sum_label_weights<T>, {.blocks = block_count(weight_parts(rows.count())), .threads = 256},
         args.stream, labels, rows.count(), weight, static_cast<LossSums*>(args.workspace));
}

// All threads of a warp call it and get the same.
ORTRAIN_DEVICE LossSums all_label_weights(const LossSums* parts, int64_t count) {
  LossSums sums{0, 0};
  for (int64_t i = lane(); i < count; i += kWarpSize) sums = AddBoth()(sums, parts[i]);
  return warp_merge(sums, AddBoth());
}

}  // namespace ortrain::gpu
