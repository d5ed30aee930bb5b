// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/axis_split.h"
#include "ortrain/gpu/row_forms.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

// Floats add in double; integers modulo 2^64.
template <class T>
using Total = std::conditional_t<std::is_integral_v<T>, uint64_t, double>;

template <class T>
ORTRAIN_DEVICE Total<T> widened(T value) {
  return static_cast<Total<T>>(static_cast<ComputeType<T>>(value));
}
template <class T>
ORTRAIN_DEVICE T narrowed(Total<T> value) {
  return static_cast<T>(static_cast<ComputeType<T>>(value));
}

struct Lines {
  int64_t outer, size, inner;
  bool exclusive, reverse;
};

template <class S>
ORTRAIN_DEVICE S warp_running_sum(S value) {
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const S below = exchange_up(value, distance);
    if (lane() >= distance) value += below;
  }
  return value;
}

// What the threads in front have; `all` is what the whole block has. All threads take part.
template <class S>
ORTRAIN_DEVICE S block_sum_before(S value, S& all) {
  __shared__ S sums[1024 / kWarpSize];
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  const S upto = warp_running_sum(value);
  if (lane() == kWarpSize - 1) sums[warp()] = upto;
  __syncthreads();
  // Not the sum less the value: that may be infinite.
  const S below = exchange_up(upto, 1);
  S before = lane() == 0 ? S{0} : below;
  all = 0;
  for (int w = 0; w < warps; ++w) {
    if (w == warp()) before += all;
    all += sums[w];
  }
  __syncthreads();
  return before;
}

// A block per line: tiles of neighbouring elements, a few per thread.
constexpr int kPerThread = 4;

template <class T>
__global__ void cum_sum_rows(Lines a, const T* x, T* y) {
  using S = Total<T>;
  const int64_t tile = int64_t{blockDim.x} * kPerThread;
  for (int64_t line = blockIdx.x; line < a.outer; line += gridDim.x) {
    S carry = 0;
    for (int64_t begin = 0; begin < a.size; begin += tile) {
      const int64_t first = begin + int64_t{threadIdx.x} * kPerThread;
      S values[kPerThread];
      S own = 0;
      ORTRAIN_UNROLL
      for (int i = 0; i < kPerThread; ++i) {
        const int64_t at = a.reverse ? a.size - 1 - (first + i) : first + i;
        values[i] = first + i < a.size ? widened(x[line * a.size + at]) : S{0};
        own += values[i];
      }
      S all;
      S sum = block_sum_before(own, all) + carry;
      carry += all;
      ORTRAIN_UNROLL
      for (int i = 0; i < kPerThread; ++i) {
        const S before = sum;
        sum += values[i];
        if (first + i >= a.size) continue;
        const int64_t at = a.reverse ? a.size - 1 - (first + i) : first + i;
        y[line * a.size + at] = narrowed<T>(a.exclusive ? before : sum);
      }
    }
  }
}

// Another axis: a thread per line, neighbours side by side.
template <class T>
__global__ void __launch_bounds__(128) cum_sum_columns(Lines a, const T* x, T* y) {
  using S = Total<T>;
  for_each_item(a.outer * a.inner, [&](int64_t line) {
    const int64_t start = line / a.inner * a.size * a.inner + line % a.inner;
    S sum = 0;
    for (int64_t step = 0; step < a.size; ++step) {
      const int64_t at = start + (a.reverse ? a.size - 1 - step : step) * a.inner;
      const S before = sum;
      sum += widened(x[at]);
      y[at] = narrowed<T>(a.exclusive ? before : sum);
    }
  });
}

KernelFn make_cum_sum(NodeSpec& spec) {
  const std::optional<std::vector<int64_t>> axis = spec.constant_ints(1);
  check(axis.has_value(), "the axis is known when a kernel is made");
  const AxisSplit split(spec.input(0).dims, axis->front());
  const Lines lines{split.outer, split.size, split.inner, spec.attrs().int_("exclusive") != 0,
                    spec.attrs().int_("reverse") != 0};
  const auto with = [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [lines](const KernelArgs& args) {
      const T* x = args.input<T>(0);
      T* y = args.output<T>(0);
      if (lines.size == 0) return;
      if (lines.inner == 1) {
        launch(cum_sum_rows<T>,
               {.blocks = block_count(std::min<int64_t>(lines.outer, 1 << 20)),
                .threads = row_threads(lines.size, kPerThread, 512)},
               args.stream, lines, x, y);
      } else {
        launch(cum_sum_columns<T>, items(lines.outer * lines.inner, 128), args.stream, lines, x, y);
      }
    };
  };
  switch (spec.input(0).dtype) {
    case DType::i32:
      return with(TypeTag<int32_t>{});
    case DType::i64:
      return with(TypeTag<int64_t>{});
    case DType::u32:
      return with(TypeTag<uint32_t>{});
    case DType::u64:
      return with(TypeTag<uint64_t>{});
    default:
      return dispatch_float(spec.input(0).dtype, with);
  }
}

}  // namespace

void register_cum_sum(KernelRegistry& registry) {
  registry.add("CumSum", {{.name = "scan", .make = make_cum_sum, .inplace = {{0, 0}}}});
}

}  // namespace ortrain::gpu
