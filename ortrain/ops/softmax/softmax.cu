// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>

#include "ortrain/base/axis_split.h"
#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/reduce.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

// --- a block per line along the axis; `inner` is the distance between its elements

struct Lines {
  int64_t count, size, inner;

  ORTRAIN_DEVICE int64_t start(int64_t line) const {
    return line / inner * size * inner + line % inner;
  }
};

template <class T>
__global__ void softmax_lines(Lines lines, bool log, const T* x, T* y) {
  using C = ComputeType<T>;
  for (int64_t line = blockIdx.x; line < lines.count; line += gridDim.x) {
    const int64_t start = lines.start(line);
    // Each thread keeps the maximum of its elements and the sum of exponentials below it.
    C top = -std::numeric_limits<C>::infinity();
    C sum = 0;
    for (int64_t i = threadIdx.x; i < lines.size; i += blockDim.x) {
      const C value = x[start + i * lines.inner];
      if (value == -std::numeric_limits<C>::infinity()) continue;
      if (value > top) {
        sum *= exp(top - value);
        top = value;
      }
      sum += exp(value - top);
    }
    // -inf everywhere: the values minus the top are NaN, as they have to be.
    const C line_top = block_reduce(top, -std::numeric_limits<C>::infinity(), Max());
    const C line_sum = block_sum(top == line_top ? sum : sum * exp(top - line_top));
    const C log_sum = ::log(line_sum);
    for (int64_t i = threadIdx.x; i < lines.size; i += blockDim.x) {
      const int64_t at = start + i * lines.inner;
      const C value = static_cast<C>(x[at]) - line_top;
      y[at] = static_cast<T>(log ? value - log_sum : static_cast<C>(exp(value)) / line_sum);
    }
  }
}

// Softmax: dx = y (dy - sum(dy y)); its logarithm: dx = dy - exp(y) sum(dy).
template <class T>
__global__ void softmax_grad_lines(Lines lines, bool log, const T* dy, const T* y, T* dx) {
  using C = ComputeType<T>;
  for (int64_t line = blockIdx.x; line < lines.count; line += gridDim.x) {
    const int64_t start = lines.start(line);
    C sum = 0;
    for (int64_t i = threadIdx.x; i < lines.size; i += blockDim.x) {
      const int64_t at = start + i * lines.inner;
      const C gradient = dy[at];
      sum += log ? gradient : gradient * static_cast<C>(y[at]);
    }
    sum = block_sum(sum);
    for (int64_t i = threadIdx.x; i < lines.size; i += blockDim.x) {
      const int64_t at = start + i * lines.inner;
      const C gradient = dy[at];
      const C value = y[at];
      dx[at] = static_cast<T>(log ? gradient - static_cast<C>(exp(value)) * sum
                                  : value * (gradient - sum));
    }
  }
}

LaunchShape shape_of(const Lines& lines) {
  return {.blocks = static_cast<unsigned>(std::min<int64_t>(lines.count, 65535)),
          .threads = row_threads(lines.size)};
}

Lines lines_of(const NodeSpec& spec) {
  const AxisSplit split(spec.input(0).dims, spec.attrs().int_("axis"));
  return {split.size == 0 ? 0 : split.outer * split.inner, split.size, split.inner};
}

template <bool kLog>
KernelFn make_softmax(NodeSpec& spec) {
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [lines = lines_of(spec)](const KernelArgs& args) {
      launch(softmax_lines<T>, shape_of(lines), args.stream, lines, kLog, args.input<T>(0),
             args.output<T>(0));
    };
  });
}

template <bool kLog>
KernelFn make_softmax_grad(NodeSpec& spec) {
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [lines = lines_of(spec)](const KernelArgs& args) {
      launch(softmax_grad_lines<T>, shape_of(lines), args.stream, lines, kLog, args.input<T>(0),
             args.input<T>(1), args.output<T>(0));
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
