// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/axis_split.h"
#include "ortrain/gpu/column_tiles.h"
#include "ortrain/gpu/exponentials.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

// y of one element: its share, or its logarithm. -inf everywhere gives NaN.
template <class C>
struct SoftmaxOf {
  C top, sum, log_sum;
  bool log;

  ORTRAIN_DEVICE SoftmaxOf(const ExponentialSum<C>& e, bool log)
      : top(e.top), sum(e.sum), log_sum(static_cast<C>(::log(e.sum))), log(log) {}
  ORTRAIN_DEVICE C operator()(C x) const {
    const C value = x - top;
    return log ? value - log_sum : static_cast<C>(exp(value)) / sum;
  }
};

// Softmax: dx = y (dy - sum(dy y)); its logarithm: dx = dy - exp(y) sum(dy).
template <class C>
ORTRAIN_DEVICE C grad_term(bool log, C dy, C y) {
  return log ? dy : dy * y;
}
template <class C>
ORTRAIN_DEVICE C grad_of(bool log, C dy, C y, C sum) {
  return log ? dy - static_cast<C>(exp(y)) * sum : y * (dy - sum);
}

// --- the axis is the last one: a warp or a block per row

template <class T, class Form>
__global__ void __launch_bounds__(Form::Team::kThreads)
    softmax_rows(int64_t rows, int64_t n, bool log, const T* x, T* y) {
  using C = ComputeType<T>;
  for (int64_t row = Form::Team::index(); row < rows; row += Form::Team::count()) {
    RowInput<T, Form> in(x + row * n);
    const SoftmaxOf<C> of(row_exponentials<Form>(in, n), log);
    Form::for_each_pack(n, [&](int k, int64_t column) {
      auto pack = in.again(k, column);
      ORTRAIN_UNROLL
      for (int i = 0; i < Form::kWidth; ++i) pack[i] = static_cast<T>(of(static_cast<C>(pack[i])));
      store_pack<Form::kWidth>(y + row * n + column, pack);
    });
  }
}

template <class T, class Form>
__global__ void __launch_bounds__(Form::Team::kThreads)
    softmax_grad_rows(int64_t rows, int64_t n, bool log, const T* dy, const T* y, T* dx) {
  using C = ComputeType<T>;
  for (int64_t row = Form::Team::index(); row < rows; row += Form::Team::count()) {
    RowInput<T, Form> gradient(dy + row * n), value(y + row * n);
    C sum = 0;
    Form::for_each_pack(n, [&](int k, int64_t column) {
      const auto g = gradient.first(k, column), v = value.first(k, column);
      ORTRAIN_UNROLL
      for (int i = 0; i < Form::kWidth; ++i) {
        sum += grad_term<C>(log, static_cast<C>(g[i]), static_cast<C>(v[i]));
      }
    });
    sum = Form::Team::reduce(sum, C{0}, Sum());
    Form::for_each_pack(n, [&](int k, int64_t column) {
      auto g = gradient.again(k, column);
      const auto v = value.again(k, column);
      ORTRAIN_UNROLL
      for (int i = 0; i < Form::kWidth; ++i) {
        g[i] = static_cast<T>(grad_of<C>(log, static_cast<C>(g[i]), static_cast<C>(v[i]), sum));
      }
      store_pack<Form::kWidth>(dx + row * n + column, g);
    });
  }
}

// --- another axis

template <class T>
__global__ void softmax_columns(ColumnTiles lines, bool log, const T* x, T* y) {
  using C = ComputeType<T>;
  lines.for_each_line([&](int64_t, int64_t start, int64_t length) {
    ExponentialSum<C> own = ExponentialSum<C>::none();
    lines.for_each_step(start, length,
                        [&](int64_t, int64_t at) { own.add(static_cast<C>(x[at])); });
    const SoftmaxOf<C> of(merge_warps(own, JoinExponentialSums()), log);
    lines.for_each_step(start, length, [&](int64_t, int64_t at) {
      y[at] = static_cast<T>(of(static_cast<C>(x[at])));
    });
  });
}

template <class T>
__global__ void softmax_grad_columns(ColumnTiles lines, bool log, const T* dy, const T* y, T* dx) {
  using C = ComputeType<T>;
  lines.for_each_line([&](int64_t, int64_t start, int64_t length) {
    C own = 0;
    lines.for_each_step(start, length, [&](int64_t, int64_t at) {
      own += grad_term<C>(log, static_cast<C>(dy[at]), static_cast<C>(y[at]));
    });
    const C sum = merge_warps(own, Sum());
    lines.for_each_step(start, length, [&](int64_t, int64_t at) {
      dx[at] = static_cast<T>(grad_of<C>(log, static_cast<C>(dy[at]), static_cast<C>(y[at]), sum));
    });
  });
}

ColumnTiles lines_of(const NodeSpec& spec) {
  const AxisSplit split(spec.input(0).dims, spec.attrs().int_("axis"));
  return {split.size == 0 ? 0 : split.outer, split.size, split.inner};
}

template <bool kLog>
KernelFn make_softmax(NodeSpec& spec) {
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [lines = lines_of(spec)](const KernelArgs& args) {
      const T* x = args.input<T>(0);
      T* y = args.output<T>(0);
      if (lines.inner != 1) {
        launch(softmax_columns<T>, lines.shape(), args.stream, lines, kLog, x, y);
        return;
      }
      with_row_form<T>(lines.size, pack_aligned(x, y), [&](auto form) {
        using Form = decltype(form);
        launch(softmax_rows<T, Form>, row_shape<Form>(lines.outer, lines.size), args.stream,
               lines.outer, lines.size, kLog, x, y);
      });
    };
  });
}

template <bool kLog>
KernelFn make_softmax_grad(NodeSpec& spec) {
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [lines = lines_of(spec)](const KernelArgs& args) {
      const T *dy = args.input<T>(0), *y = args.input<T>(1);
      T* dx = args.output<T>(0);
      if (lines.inner != 1) {
        launch(softmax_grad_columns<T>, lines.shape(), args.stream, lines, kLog, dy, y, dx);
        return;
      }
      with_row_form<T>(lines.size, pack_aligned(dy, y, dx), [&](auto form) {
        using Form = decltype(form);
        launch(softmax_grad_rows<T, Form>, row_shape<Form>(lines.outer, lines.size), args.stream,
               lines.outer, lines.size, kLog, dy, y, dx);
      });
    };
  });
}

}  // namespace

void register_softmax(KernelRegistry& registry) {
  registry.add("Softmax", {{.name = "lines", .make = make_softmax<false>, .inplace = {{0, 0}}}});
  registry.add("LogSoftmax", {{.name = "lines", .make = make_softmax<true>, .inplace = {{0, 0}}}});
  registry.add("ortrain::SoftmaxGrad",
               {{.name = "lines", .make = make_softmax_grad<false>, .inplace = {{0, 0}, {1, 0}}}});
  registry.add("ortrain::LogSoftmaxGrad",
               {{.name = "lines", .make = make_softmax_grad<true>, .inplace = {{0, 0}, {1, 0}}}});
}

}  // namespace ortrain::gpu
