// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "ortrain/cpu/simd/row_ops.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/ops/loss/cross_entropy_rows.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

using Config = CrossEntropyConfig;
using Workspace = CrossEntropyWorkspace;
template <class T>
using GradRun = CrossEntropyGradRun<T>;
using ops::LabelRows;

template <class T>
using Compute = ComputeType<T>;

// The weighted sum over classes that smoothing needs, times s / C: sum_c w[c] (lse - x[c]).
template <class T, class Score>
double smooth_term(const Config& c, double lse, const T* weight, Score score) {
  const int64_t classes = c.rows.split.size;
  double sum = 0;
  for (int64_t k = 0; k < classes; ++k) {
    const double w = weight == nullptr ? 1.0 : static_cast<double>(weight[k]);
    sum += w * (lse - static_cast<double>(score(k)));
  }
  return sum * c.smoothing / static_cast<double>(classes);
}

// The rest of one label's loss, given its log-sum-exp.
template <class T, class Score>
double loss_of(const Config& c, int64_t label, double lse, const T* weight, Score score) {
  const double w = weight == nullptr ? 1.0 : static_cast<double>(weight[label]);
  double loss = (1.0 - c.smoothing) * w * (lse - static_cast<double>(score(label)));
  if (c.smoothing > 0.0) loss += smooth_term(c, lse, weight, score);
  return loss;
}

template <class T>
void write_loss(const Config& c, const Workspace& work, double weights, const KernelArgs& args) {
  if (c.full_loss) {
    ops::reduce_losses(c.rows, work.losses, weights, args.output<Compute<T>>(0));
  } else {
    ops::reduce_losses(c.rows, work.losses, weights, args.output<T>(0));
  }
}

// Outputs: loss, then either the log-sum-exp per label or the log-probabilities.
enum class Second { kNone, kLogsumexp, kLogProbabilities };

template <class T>
void forward_rows(const Config& c, Second second, const KernelArgs& args) {
  using C = Compute<T>;
  const LabelRows& rows = c.rows;
  const Workspace work(args.workspace, rows.count());
  rows.read_labels(args.in[1], work.labels);
  const T* weight = c.has_weight ? args.input<T>(2) : nullptr;
  const int64_t n = rows.split.size;
  const auto ops = row_ops<C>();
  parallel_for(rows.count(), row_grain(n), [&](int64_t begin, int64_t end) {
    RowAccess<T, 2> access(n);
    for (int64_t i = begin; i < end; ++i) {
      work.losses[i] = 0;
      const bool counts = work.labels[i] >= 0;
      if (second == Second::kLogsumexp) args.output<C>(1)[i] = C{0};
      if (!counts && second != Second::kLogProbabilities) continue;
      const C* x = access.read(0, args.input<T>(0) + i * n);
      const C max = ops.max(x, n);
      const C lse = max + std::log(ops.sum_exp_shifted(max, x, n));
      if (counts)
        work.losses[i] = loss_of(c, work.labels[i], lse, weight, [&](int64_t k) { return x[k]; });
      if (second == Second::kLogsumexp) args.output<C>(1)[i] = lse;
      if (second == Second::kLogProbabilities) {
        T* out = args.output<T>(1) + i * n;
        ops.log_softmax(x, access.target(1, out), n);
        access.write(1, out);
      }
    }
  });
  write_loss<T>(c, work, ops::weight_sum(rows, work.labels, weight), args);
}

template <class T>
void forward_ref(const Config& c, Second second, const KernelArgs& args) {
  using C = Compute<T>;
  const LabelRows& rows = c.rows;
  const Workspace work(args.workspace, rows.count());
  rows.read_labels(args.in[1], work.labels);
  const T* weight = c.has_weight ? args.input<T>(2) : nullptr;
  const int64_t n = rows.split.size;
  const int64_t step = rows.split.inner;
  parallel_for(rows.count(), row_grain(n), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T* x = args.input<T>(0) + rows.base(i);
      double max = -std::numeric_limits<double>::infinity();
      for (int64_t k = 0; k < n; ++k) max = std::max(max, static_cast<double>(x[k * step]));
      double sum = 0;
      for (int64_t k = 0; k < n; ++k) sum += std::exp(static_cast<double>(x[k * step]) - max);
      const double lse = max + std::log(sum);
      const bool counts = work.labels[i] >= 0;
      work.losses[i] = 0;
      if (counts)
        work.losses[i] =
            loss_of(c, work.labels[i], lse, weight, [&](int64_t k) { return x[k * step]; });
      if (second == Second::kLogsumexp) args.output<C>(1)[i] = counts ? static_cast<C>(lse) : C{0};
      if (second != Second::kLogProbabilities) continue;
      for (int64_t k = 0; k < n; ++k) {
        const double shifted = static_cast<double>(x[k * step]) - max;
        args.output<T>(1)[rows.base(i) + k * step] =
            static_cast<T>(static_cast<C>(shifted - std::log(sum)));
      }
    }
  });
  write_loss<T>(c, work, ops::weight_sum(rows, work.labels, weight), args);
}

template <bool kRows>
KernelFn make_forward(NodeSpec& spec) {
  const bool standard = spec.node().op == "SoftmaxCrossEntropyLoss";
  const Config config{LabelRows(spec, 0, 1),
                      standard ? 0.0 : spec.attrs().float_("label_smoothing"), spec.has_input(2),
                      !standard && spec.attrs().int_("full_loss") != 0};
  const Second second = !spec.has_output(1) ? Second::kNone
                        : standard          ? Second::kLogProbabilities
                                            : Second::kLogsumexp;
  spec.request_workspace(Workspace::bytes(config.rows.count()));
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [config, second](const KernelArgs& args) {
      if constexpr (kRows) {
        forward_rows<T>(config, second, args);
      } else {
        forward_ref<T>(config, second, args);
      }
    };
  });
}

// --- gradient

template <class T>
void backward_rows(const Config& c, bool has_lse, const KernelArgs& args) {
  using C = Compute<T>;
  const GradRun<T> run(c, args, has_lse);
  const int64_t n = c.rows.split.size;
  const auto ops = row_ops<C>();
  parallel_for(c.rows.count(), row_grain(n), [&](int64_t begin, int64_t end) {
    RowAccess<T, 3> access(n);
    const C* weight = run.smooths_by_weight() ? access.read(2, run.weight) : nullptr;
    for (int64_t i = begin; i < end; ++i) {
      T* out = args.output<T>(0) + i * n;
      if (run.labels[i] < 0) {
        std::fill(out, out + n, T(Compute<T>{0}));
        continue;
      }
      const C* x = access.read(0, args.input<T>(1) + i * n);
      run.row(ops, i, x, weight, access.target(1, out));
      access.write(1, out);
    }
  });
}

template <class T>
void backward_ref(const Config& c, bool has_lse, const KernelArgs& args) {
  using C = Compute<T>;
  const GradRun<T> run(c, args, has_lse);
  const int64_t n = c.rows.split.size;
  const int64_t step = c.rows.split.inner;
  parallel_for(c.rows.count(), row_grain(n), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T* x = args.input<T>(1) + c.rows.base(i);
      T* dx = args.output<T>(0) + c.rows.base(i);
      if (run.labels[i] < 0) {
        for (int64_t k = 0; k < n; ++k) dx[k * step] = T(C{0});
        continue;
      }
      double lse;
      if (run.has_lse) {
        lse = args.input<C>(3)[i];
      } else {
        double max = -std::numeric_limits<double>::infinity();
        for (int64_t k = 0; k < n; ++k) max = std::max(max, static_cast<double>(x[k * step]));
        double sum = 0;
        for (int64_t k = 0; k < n; ++k) sum += std::exp(static_cast<double>(x[k * step]) - max);
        lse = max + std::log(sum);
      }
      const double hit = run.hit(i);
      const double spread = run.spread(i);
      for (int64_t k = 0; k < n; ++k) {
        const double p = std::exp(static_cast<double>(x[k * step]) - lse);
        const double w = run.weight == nullptr ? 1.0 : static_cast<double>(run.weight[k]);
        double value = p * (hit + spread * run.total_weight) - spread * w;
        if (k == run.labels[i]) value -= hit;
        dx[k * step] = static_cast<T>(static_cast<C>(value));
      }
    }
  });
}

template <bool kRows>
KernelFn make_backward(NodeSpec& spec) {
  const Config config{LabelRows(spec, 1, 2), spec.attrs().float_("label_smoothing"),
                      spec.has_input(4), spec.attrs().int_("full_loss") != 0};
  const bool has_lse = spec.has_input(3);
  spec.request_workspace(Workspace::bytes(config.rows.count()));
  return dispatch_float(spec.input(1).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [config, has_lse](const KernelArgs& args) {
      if constexpr (kRows) {
        backward_rows<T>(config, has_lse, args);
      } else {
        backward_ref<T>(config, has_lse, args);
      }
    };
  });
}

template <size_t kScores>
std::optional<std::string> needs_contiguous_classes(const NodeSpec& spec) {
  const Dims& dims = spec.input(kScores).dims;
  if (AxisSplit(dims, dims.size() == 1 ? 0 : 1).inner != 1) return "classes are not contiguous";
  return std::nullopt;
}

}  // namespace

void register_cross_entropy(KernelRegistry& registry) {
  const std::vector<Kernel> forward = {
      {.name = "simd", .why_not = needs_contiguous_classes<0>, .make = make_forward<true>},
      {.name = "ref", .make = make_forward<false>}};
  registry.add("ortrain::CrossEntropy", forward);
  registry.add("SoftmaxCrossEntropyLoss", forward);
  registry.add("ortrain::CrossEntropyGrad",
               {{.name = "simd",
                 .why_not = needs_contiguous_classes<1>,
                 .make = make_backward<true>,
                 .inplace = {{1, 0}}},
                {.name = "ref", .make = make_backward<false>, .inplace = {{1, 0}}}});
}

}  // namespace ortrain::cpu
