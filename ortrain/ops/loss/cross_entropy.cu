// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/loss/cross_entropy_rows.cuh"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

// --- forward

// The loss of each label goes to `each`, or, summed by team, with its weight, to `parts`.
template <class T>
struct ClassLoss {
  using C = ComputeType<T>;
  int64_t outer, classes, inner;
  Labels labels;
  C smoothing;
  const T *x, *weight;
  T* each;
  C* full_each;  // in place of each
  LossSums* parts;
  C* logsumexp;
  T* log_probabilities;

  ORTRAIN_DEVICE C weight_of(int64_t k) const {
    return weight == nullptr ? C{1} : static_cast<C>(weight[k]);
  }
  // Whether the scores of a label are needed at all.
  ORTRAIN_DEVICE bool skips(int64_t label) const {
    return label < 0 && log_probabilities == nullptr;
  }
  // What smoothing adds for one class.
  ORTRAIN_DEVICE C smooth(int64_t k, C x, C lse) const { return weight_of(k) * (lse - x); }
  // One thread, for each label that it is told of: `score` is that of the label.
  ORTRAIN_DEVICE void store(int64_t i, int64_t label, C lse, C score, C smooth_sum,
                            LossSums& sums) const {
    C loss = 0;
    if (label >= 0) {
      const C w = weight_of(label);
      loss = (C{1} - smoothing) * w * (lse - score);
      if (smoothing > C{0}) loss += smoothing / static_cast<C>(classes) * smooth_sum;
      sums.first += static_cast<double>(loss);
      sums.second += static_cast<double>(w);
    }
    if (each != nullptr) each[i] = static_cast<T>(loss);
    if (full_each != nullptr) full_each[i] = loss;
    if (logsumexp != nullptr) logsumexp[i] = label >= 0 ? lse : C{0};
  }
};

template <class T, class Form>
__global__ void __launch_bounds__(Form::Team::kThreads)
    class_loss_rows(ClassLoss<T> a, int64_t rows) {
  using C = ComputeType<T>;
  const int64_t n = a.classes;
  LossSums sums{0, 0};
  for (int64_t row = Form::Team::index(); row < rows; row += Form::Team::count()) {
    const int64_t label = a.labels.read(row);
    if (a.skips(label)) {
      if (Form::Team::rank() == 0) a.store(row, label, C{0}, C{0}, C{0}, sums);
      continue;
    }
    RowInput<T, Form> in(a.x + row * n, a.x + rows * n);
    const ExponentialSum<C> e = row_exponentials<Form>(in, n);
    const C lse = e.log_sum(), log_sum = static_cast<C>(::log(e.sum));
    C smooth_sum = 0;
    if (a.smoothing > C{0} && label >= 0) {
      Form::for_each_pack(n, [&](int k, int64_t column) {
        const auto x = in.again(k, column);
        ORTRAIN_UNROLL
        for (int i = 0; i < Form::kWidth; ++i) {
          if (Form::has(column, i, n)) {
            smooth_sum += a.smooth(column + i, static_cast<C>(x[i]), lse);
          }
        }
      });
      smooth_sum = Form::Team::reduce(smooth_sum, C{0}, Sum());
    }
    if (Form::Team::rank() == 0) {
      const C score = label < 0 ? C{0} : static_cast<C>(a.x[row * n + label]);
      a.store(row, label, lse, score, smooth_sum, sums);
    }
    if (Form::kRagged || a.log_probabilities == nullptr) continue;
    Form::for_each_pack(n, [&](int k, int64_t column) {
      auto x = in.again(k, column);
      ORTRAIN_UNROLL
      for (int i = 0; i < Form::kWidth; ++i) {
        x[i] = static_cast<T>(static_cast<C>(x[i]) - e.top - log_sum);
      }
      store_pack<Form::kWidth>(a.log_probabilities + row * n + column, x);
    });
  }
  if (a.parts != nullptr && Form::Team::rank() == 0) a.parts[Form::Team::index()] = sums;
}

// Classes that do not lie side by side.
template <class T>
__global__ void class_loss_columns(ClassLoss<T> a) {
  using C = ComputeType<T>;
  const ColumnTiles lines{a.outer, a.classes, a.inner};
  LossSums sums{0, 0};
  lines.for_each_line([&](int64_t i, int64_t start, int64_t length) {
    const bool inside = length > 0;
    const int64_t label = inside ? a.labels.read(i) : -1;
    ExponentialSum<C> own = ExponentialSum<C>::none();
    lines.for_each_step(start, length,
                        [&](int64_t, int64_t at) { own.add(static_cast<C>(a.x[at])); });
    const ExponentialSum<C> e = merge_warps(own, JoinExponentialSums());
    const C lse = e.log_sum(), log_sum = static_cast<C>(::log(e.sum));
    C smooth_sum = 0;
    if (a.smoothing > C{0}) {
      lines.for_each_step(start, length, [&](int64_t k, int64_t at) {
        smooth_sum += a.smooth(k, static_cast<C>(a.x[at]), lse);
      });
      smooth_sum = merge_warps(smooth_sum, Sum());
    }
    if (warp() == 0 && inside) {
      const C score = label < 0 ? C{0} : static_cast<C>(a.x[start + label * a.inner]);
      a.store(i, label, lse, score, smooth_sum, sums);
    }
    if (a.log_probabilities == nullptr) return;
    lines.for_each_step(start, length, [&](int64_t, int64_t at) {
      a.log_probabilities[at] = static_cast<T>(static_cast<C>(a.x[at]) - e.top - log_sum);
    });
  });
  if (a.parts == nullptr) return;
  sums = block_merge(sums, LossSums{0, 0}, AddBoth());
  if (threadIdx.x == 0) a.parts[blockIdx.x] = sums;
}

KernelFn make_forward(NodeSpec& spec) {
  const bool standard = spec.node().op == "SoftmaxCrossEntropyLoss";
  const ClassRows rows(spec, spec.input(0).dims, 1);
  const double smoothing = standard ? 0.0 : spec.attrs().float_("label_smoothing");
  const bool has_weight = spec.has_input(2), has_second = spec.has_output(1);
  const bool reduces = rows.reduction != ops::Reduction::none;
  const bool full = !standard && spec.attrs().int_("full_loss") != 0;
  // One part more than teams: those of a block may be more than rows are left.
  if (reduces) spec.request_workspace(bytes_of<LossSums>(kMostLossParts + kWarpSize));
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    return [=](const KernelArgs& args) {
      const ClassLoss<T> loss{
          .outer = rows.outer,
          .classes = rows.classes,
          .inner = rows.inner,
          .labels = rows.labels_of(args, 1),
          .smoothing = static_cast<C>(smoothing),
          .x = args.input<T>(0),
          .weight = has_weight ? args.input<T>(2) : nullptr,
          .each = reduces || full ? nullptr : args.output<T>(0),
          .full_each = !reduces && full ? args.output<C>(0) : nullptr,
          .parts = reduces ? static_cast<LossSums*>(args.workspace) : nullptr,
          .logsumexp = has_second && !standard ? args.output<C>(1) : nullptr,
          .log_probabilities = has_second && standard ? args.output<T>(1) : nullptr};
      const int64_t most = reduces ? kMostLossParts : int64_t{1} << 20;
      int64_t parts = 0;
      if (rows.inner != 1) {
        const LaunchShape shape = rows.tiles().shape(most);
        parts = shape.blocks;
        launch(class_loss_columns<T>, shape, args.stream, loss);
      } else {
        const bool aligned = pack_aligned(loss.x, loss.log_probabilities);
        const auto launch_rows = [&](auto form) {
          using Form = decltype(form);
          parts = row_teams<Form>(rows.outer, rows.classes, most);
          launch(class_loss_rows<T, Form>, row_shape<Form>(rows.outer, rows.classes, most),
                 args.stream, loss, rows.outer);
        };
        if (loss.log_probabilities == nullptr) {
          with_ragged_row_form<T>(rows.classes, aligned, launch_rows);
        } else {
          with_row_form<T>(rows.classes, aligned, launch_rows);
        }
      }
      if (reduces && full) {
        launch_finish_loss<C>(args, rows, parts);
      } else if (reduces) {
        launch_finish_loss<T>(args, rows, parts);
      }
    };
  });
}

// --- gradient: inputs dloss, logits, labels, logsumexp, weight

template <class T, class Form>
__global__ void __launch_bounds__(Form::Team::kThreads)
    class_loss_grad_rows(ClassLossGrad<T> a, int64_t rows) {
  const int64_t n = a.classes;
  const LossSums weights = a.all_weights();
  for (int64_t row = Form::Team::index(); row < rows; row += Form::Team::count()) {
    class_loss_grad_row<T, Form>(a, weights, row, a.x + row * n, a.dx + row * n);
  }
}

template <class T>
__global__ void class_loss_grad_columns(ClassLossGrad<T> a, ColumnTiles lines) {
  using C = ComputeType<T>;
  const LossSums weights = a.all_weights();
  lines.for_each_line([&](int64_t i, int64_t start, int64_t length) {
    const int64_t label = length > 0 ? a.labels.read(i) : -1;
    C lse = 0;
    if (a.logsumexp == nullptr) {
      ExponentialSum<C> own = ExponentialSum<C>::none();
      lines.for_each_step(start, length,
                          [&](int64_t, int64_t at) { own.add(static_cast<C>(a.x[at])); });
      lse = merge_warps(own, JoinExponentialSums()).log_sum();
    } else if (label >= 0) {
      lse = a.logsumexp[i];
    }
    const ClassLossSlope<T> slope(a, weights, i, label);
    lines.for_each_step(start, length, [&](int64_t k, int64_t at) {
      a.dx[at] = static_cast<T>(label < 0 ? C{0} : slope.of(a, k, static_cast<C>(a.x[at]), lse));
    });
  });
}

KernelFn make_backward(NodeSpec& spec) {
  const ClassRows rows(spec, spec.input(1).dims, 2);
  const ClassLossGradPlan plan(spec, rows, spec.has_input(4));
  const bool has_lse = spec.has_input(3), has_weight = spec.has_input(4);
  spec.request_workspace(plan.bytes());
  return dispatch_float(spec.input(1).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    return [=](const KernelArgs& args) {
      const ClassLossGrad<T> grad =
          plan.grad<T>(args, has_lse ? args.input<C>(3) : nullptr,
                       has_weight ? args.input<T>(4) : nullptr, args.output<T>(0));
      plan.launch_weights(args, grad);
      if (rows.inner != 1) {
        launch(class_loss_grad_columns<T>, rows.tiles().shape(), args.stream, grad, rows.tiles());
        return;
      }
      with_row_form<T>(rows.classes, pack_aligned(grad.x, grad.dx), [&](auto form) {
        using Form = decltype(form);
        launch(class_loss_grad_rows<T, Form>, row_shape<Form>(rows.outer, rows.classes),
               args.stream, grad, rows.outer);
      });
    };
  });
}

}  // namespace

void register_cross_entropy(KernelRegistry& registry) {
  registry.add("ortrain::CrossEntropy", {{.name = "rows", .make = make_forward}});
  registry.add("SoftmaxCrossEntropyLoss", {{.name = "rows", .make = make_forward}});
  registry.add("ortrain::CrossEntropyGrad",
               {{.name = "rows", .make = make_backward, .inplace = {{1, 0}}}});
}

}  // namespace ortrain::gpu
