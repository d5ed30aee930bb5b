// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/gpu/reduce.h"
#include "ortrain/gpu/strided_copy.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

using Counter = unsigned long long;  // what CUDA has atomic additions for

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 512;
constexpr int64_t kMostShared = 8192;  // bins that are counted in shared memory first

template <class C>
struct Bins {
  int64_t count, n;
  C low, high;
  int64_t ranges;  // blocks that looked for the range of the data; 0: it is given
};

template <class T, class C>
__global__ void __launch_bounds__(kThreads) find_range(int64_t n, const T* x, C* ranges) {
  C low = static_cast<C>(x[0]), high = low;
  for_each_item(n, [&](int64_t i) {
    const C value = static_cast<C>(x[i]);
    low = Min()(value, low);
    high = Max()(value, high);
  });
  low = block_reduce(low, static_cast<C>(x[0]), Min());
  high = block_reduce(high, static_cast<C>(x[0]), Max());
  if (threadIdx.x != 0) return;
  ranges[2 * blockIdx.x] = low;
  ranges[2 * blockIdx.x + 1] = high;
}

// Counts of whole numbers: their order does not matter.
template <class T, class C>
__global__ void __launch_bounds__(kThreads)
    count_bins(Bins<C> bins, FaultReporter faults, const T* x, const C* ranges, Counter* counts) {
  C low = bins.low, high = bins.high;
  if (bins.ranges > 0) {
    low = ranges[0];
    high = ranges[1];
    for (int64_t i = threadIdx.x; i < bins.ranges; i += kThreads) {
      low = Min()(ranges[2 * i], low);
      high = Max()(ranges[2 * i + 1], high);
    }
    low = block_reduce(low, ranges[0], Min());
    high = block_reduce(high, ranges[1], Max());
  }
  if (low == high) {
    low -= C{1};
    high += C{1};
  }
  const C width = high - low, scale = static_cast<C>(bins.count);
  if (width - width != 0) {  // not finite
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      faults.report(FaultKind::range, 0, 0, std::bit_cast<int64_t>(static_cast<double>(low)),
                    std::bit_cast<int64_t>(static_cast<double>(high)));
    }
    return;
  }
  uint32_t* mine = dynamic_shared<uint32_t>();
  const bool shared = bins.count <= kMostShared;
  if (shared) {
    for (int64_t b = threadIdx.x; b < bins.count; b += kThreads) mine[b] = 0;
    __syncthreads();
  }
  for_each_item(bins.n, [&](int64_t i) {
    const C value = static_cast<C>(x[i]);
    if (!(value >= low && value <= high)) return;
    // 1e20 and 1 more are the same: without a width all are in the first bin.
    C place = width > C{0} ? (value - low) * scale / width : C{0};
    if (place - place != 0) place = (value - low) / width * scale;  // the product is not finite
    const bool inside = static_cast<double>(place) < static_cast<double>(bins.count - 1);
    const int64_t bin = inside ? static_cast<int64_t>(place) : bins.count - 1;
    if (shared) {
      atomic_add(mine + bin, 1u);
    } else {
      atomic_add(counts + bin, Counter{1});
    }
  });
  if (!shared) return;
  __syncthreads();
  for (int64_t b = threadIdx.x; b < bins.count; b += kThreads) {
    if (mine[b] != 0) atomic_add(counts + b, static_cast<Counter>(mine[b]));
  }
}

template <class T, class C>
__global__ void __launch_bounds__(kItemThreads)
    write_counts(int64_t count, const Counter* counts, T* out) {
  for_each_item(count, [&](int64_t b) { out[b] = static_cast<T>(static_cast<C>(counts[b])); });
}

template <class T>
KernelFn bin_count_of(NodeSpec& spec) {
  using C = ComputeType<T>;
  Bins<C> bins{spec.output(0).numel(), spec.input(0).numel(),
               static_cast<C>(spec.attrs().float_("min")),
               static_cast<C>(spec.attrs().float_("max")), 0};
  const LaunchShape shape = items(std::max<int64_t>(bins.n, 1), kThreads, kMostBlocks);
  if (bins.low == 0 && bins.high == 0 && bins.n > 0) bins.ranges = shape.blocks;
  spec.request_workspace(bytes_of<Counter>(bins.count) + bytes_of<C>(2, bins.ranges));
  return [bins, shape](const KernelArgs& args) {
    const T* x = args.input<T>(0);
    Counter* counts = static_cast<Counter*>(args.workspace);
    C* ranges = reinterpret_cast<C*>(counts + bins.count);
    if (bins.ranges > 0) launch(find_range<T, C>, shape, args.stream, bins.n, x, ranges);
    fill_elements(counts, bins.count, sizeof(Counter), 0, args.stream);
    LaunchShape counting = shape;
    if (bins.count <= kMostShared) {
      counting.shared_bytes = static_cast<size_t>(bins.count) * sizeof(uint32_t);
    }
    launch(count_bins<T, C>, counting, args.stream, bins, FaultReporter(args), x, ranges, counts);
    launch(write_counts<T, C>, items(bins.count), args.stream, bins.count, counts,
           args.output<T>(0));
  };
}

KernelFn make_bin_count(NodeSpec& spec) {
  return dispatch_float(spec.input(0).dtype,
                        [&](auto tag) { return bin_count_of<typename decltype(tag)::type>(spec); });
}

}  // namespace

void register_bin_count(KernelRegistry& registry) {
  registry.add("ortrain::BinCount", {{.name = "counters", .make = make_bin_count}});
}

}  // namespace ortrain::gpu
