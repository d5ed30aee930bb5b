// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/loss/class_rows.cuh"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

constexpr int64_t kMostBlocks = 1024;

template <class T>
__global__ void __launch_bounds__(256)
    nll_loss(ClassRows rows, Labels labels, const T* x, const T* weight, T* each, LossSums* parts) {
  using C = ComputeType<T>;
  LossSums sums{0, 0};
  for_each_item(rows.outer * rows.inner, [&](int64_t i) {
    const int64_t label = labels.read(i);
    C loss = 0;
    if (label >= 0) {
      const C w = weight == nullptr ? C{1} : static_cast<C>(weight[label]);
      const int64_t row = i / rows.inner, column = i % rows.inner;
      loss = -w * static_cast<C>(x[(row * rows.classes + label) * rows.inner + column]);
      sums.first += static_cast<double>(loss);
      sums.second += static_cast<double>(w);
    }
    if (each != nullptr) each[i] = static_cast<T>(loss);
  });
  if (parts == nullptr) return;
  sums = block_merge(sums, LossSums{0, 0}, AddBoth());
  if (threadIdx.x == 0) parts[blockIdx.x] = sums;
}

KernelFn make_forward(NodeSpec& spec) {
  const ClassRows rows(spec, spec.input(0).dims, 1);
  const bool has_weight = spec.has_input(2), reduces = rows.reduction != ops::Reduction::none;
  if (reduces) spec.request_workspace(bytes_of<LossSums>(kMostBlocks));
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [=](const KernelArgs& args) {
      const LaunchShape shape = items(rows.count(), 256, kMostBlocks);
      launch(nll_loss<T>, shape, args.stream, rows, rows.labels_of(args, 1), args.input<T>(0),
             has_weight ? args.input<T>(2) : nullptr, reduces ? nullptr : args.output<T>(0),
             reduces ? static_cast<LossSums*>(args.workspace) : nullptr);
      if (reduces) launch_finish_loss<T>(args, rows, shape.blocks);
    };
  });
}

// dx is -w dloss at the labels and zero elsewhere.
template <class T>
__global__ void __launch_bounds__(kItemThreads)
    nll_loss_grad(ClassRows rows, Labels labels, bool each, const T* dloss, const T* weight,
                  const LossSums* parts, int64_t part_count, T* dx) {
  using C = ComputeType<T>;
  const double weights = parts == nullptr ? 1.0 : all_label_weights(parts, part_count).first;
  for_each_item(rows.outer * rows.classes * rows.inner, [&](int64_t at) {
    const int64_t line = at / rows.inner, row = line / rows.classes;
    const int64_t i = row * rows.inner + at % rows.inner;
    const int64_t label = labels.read(i);
    C value = 0;
    if (label == line % rows.classes) {
      const C w = weight == nullptr ? C{1} : static_cast<C>(weight[label]);
      value = -w * static_cast<C>(dloss[each ? i : 0]) / static_cast<C>(weights);
    }
    dx[at] = static_cast<T>(value);
  });
}

// Inputs dloss, target, shape, weight.
KernelFn make_backward(NodeSpec& spec) {
  const ClassRows rows(spec, spec.output(0).dims, 1);
  const bool has_weight = spec.has_input(3), mean = rows.reduction == ops::Reduction::mean;
  const int64_t parts = weight_parts(rows.count());
  if (mean) spec.request_workspace(bytes_of<LossSums>(parts));
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [=](const KernelArgs& args) {
      const Labels labels = rows.labels_of(args, 1);
      const T* weight = has_weight ? args.input<T>(3) : nullptr;
      if (mean) launch_label_weights<T>(args, rows, labels, weight);
      launch(nll_loss_grad<T>, items(rows.count() * rows.classes), args.stream, rows, labels,
             rows.reduction == ops::Reduction::none, args.input<T>(0), weight,
             mean ? static_cast<const LossSums*>(args.workspace) : nullptr, parts,
             args.output<T>(0));
    };
  });
}

}  // namespace

void register_nll_loss(KernelRegistry& registry) {
  registry.add("NegativeLogLikelihoodLoss", {{.name = "labels", .make = make_forward}});
  registry.add("ortrain::NegativeLogLikelihoodLossGrad",
               {{.name = "labels", .make = make_backward}});
}

}  // namespace ortrain::gpu
