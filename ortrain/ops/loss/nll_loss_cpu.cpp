// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ortrain/cpu/threads.h"
#include "ortrain/ops/loss/label_rows.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

using ops::LabelRows;
using ops::Reduction;

KernelFn make_forward(NodeSpec& spec) {
  const LabelRows rows(spec, 0, 1);
  const bool has_weight = spec.has_input(2);
  spec.request_workspace(bytes_of<int64_t>(rows.count()) + bytes_of<double>(rows.count()));
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [rows, has_weight](const KernelArgs& args) {
      int64_t* labels = static_cast<int64_t*>(args.workspace);
      double* losses = reinterpret_cast<double*>(labels + rows.count());
      rows.read_labels(args.in[1], labels);
      const T* weight = has_weight ? args.input<T>(2) : nullptr;
      for (int64_t i = 0; i < rows.count(); ++i) {
        losses[i] = 0;
        if (labels[i] < 0) continue;
        const double w = weight == nullptr ? 1.0 : static_cast<double>(weight[labels[i]]);
        losses[i] =
            -w * static_cast<double>(args.input<T>(0)[rows.base(i) + labels[i] * rows.split.inner]);
      }
      ops::reduce_losses(rows, losses, ops::weight_sum(rows, labels, weight), args.output<T>(0));
    };
  });
}

// The gradient kernel sees the shape of the scores at its output.
LabelRows rows_of_grad(const NodeSpec& spec) {
  LabelRows rows(spec, 1, 1);
  const Dims& scores = spec.output(0).dims;
  rows.split = AxisSplit(scores, scores.size() == 1 ? 0 : 1);
  return rows;
}

KernelFn make_backward(NodeSpec& spec) {
  const LabelRows rows = rows_of_grad(spec);
  const bool has_weight = spec.has_input(3);
  const int64_t size = spec.output(0).numel();
  spec.request_workspace(bytes_of<int64_t>(rows.count()));
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [rows, has_weight, size](const KernelArgs& args) {
      int64_t* labels = static_cast<int64_t*>(args.workspace);
      rows.read_labels(args.in[1], labels);
      const T* weight = has_weight ? args.input<T>(3) : nullptr;
      T* dx = args.output<T>(0);
      parallel_for(size, 1 << 16, [&](int64_t begin, int64_t end) {
        std::fill(dx + begin, dx + end, T(ComputeType<T>{0}));
      });
      const double normalizer =
          rows.reduction == Reduction::mean ? ops::weight_sum(rows, labels, weight) : 1.0;
      for (int64_t i = 0; i < rows.count(); ++i) {
        if (labels[i] < 0) continue;
        const double w = weight == nullptr ? 1.0 : static_cast<double>(weight[labels[i]]);
        const int64_t at = rows.reduction == Reduction::none ? i : 0;
        const double dloss = static_cast<double>(args.input<T>(0)[at]);
        dx[rows.base(i) + labels[i] * rows.split.inner] =
            static_cast<T>(static_cast<ComputeType<T>>(-w * dloss / normalizer));
      }
    };
  });
}

}  // namespace

void register_nll_loss(KernelRegistry& registry) {
  registry.add("NegativeLogLikelihoodLoss", {{.name = "ref", .make = make_forward}});
  registry.add("ortrain::NegativeLogLikelihoodLossGrad", {{.name = "ref", .make = make_backward}});
}

}  // namespace ortrain::cpu
