// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

constexpr int64_t kBlocks = 16;

template <typename T>
KernelFn bin_count_of(NodeSpec& spec) {
  using C = ComputeType<T>;
  const int64_t n = spec.input(0).numel();
  const int64_t bins = spec.output(0).numel();
  const C given_low = static_cast<C>(spec.attrs().float_("min"));
  const C given_high = static_cast<C>(spec.attrs().float_("max"));
  spec.request_workspace(bytes_of<int64_t>(kBlocks, bins));
  return [=, context = spec.context()](const KernelArgs& args) {
    const T* x = args.input<T>(0);
    C low = given_low, high = given_high;
    if (low == high && low == C{0} && n > 0) {
      low = high = static_cast<C>(x[0]);
      for (int64_t i = 0; i < n; ++i) {
        const C value = static_cast<C>(x[i]);
        // A NaN stays in both bounds.
        if (value < low || value != value) low = value;
        if (value > high || value != value) high = value;
        if (value != value) break;
      }
    }
    if (!std::isfinite(low) || !std::isfinite(high)) {
      throw IndexError(str(context, "the range [", low, ", ", high, "] of x is not finite"));
    }
    if (low == high) {
      low -= C{1};
      high += C{1};
    }
    const C width = high - low;
    if (!std::isfinite(width)) {
      throw IndexError(
          str(context, "the width of the range [", low, ", ", high, "] is not finite"));
    }
    const C scale = static_cast<C>(bins);
    const double last = static_cast<double>(bins - 1);
    int64_t* counts = static_cast<int64_t*>(args.workspace);
    parallel_blocks(kBlocks, [&](int64_t block) {
      int64_t* mine = counts + block * bins;
      std::fill_n(mine, bins, 0);
      const int64_t end = n * (block + 1) / kBlocks;
      for (int64_t i = n * block / kBlocks; i < end; ++i) {
        const C value = static_cast<C>(x[i]);
        if (!(value >= low && value <= high)) continue;
        // 1e20 and 1 more are the same: without a width all are in the first bin.
        C bin = width > C{0} ? (value - low) * scale / width : C{0};
        if (!std::isfinite(bin)) bin = (value - low) / width * scale;
        ++mine[static_cast<int64_t>(std::clamp(static_cast<double>(bin), 0.0, last))];
      }
    });
    T* out = args.output<T>(0);
    for (int64_t b = 0; b < bins; ++b) {
      int64_t total = 0;
      for (int64_t block = 0; block < kBlocks; ++block) total += counts[block * bins + b];
      out[b] = static_cast<T>(static_cast<C>(total));
    }
  };
}

KernelFn make_bin_count(NodeSpec& spec) {
  return dispatch_float(spec.input(0).dtype,
                        [&](auto tag) { return bin_count_of<typename decltype(tag)::type>(spec); });
}

}  // namespace

void register_bin_count(KernelRegistry& registry);
void register_bin_count(KernelRegistry& registry) {
  registry.add("ortrain::BinCount", {{.name = "ref", .make = make_bin_count}});
}

}  // namespace ortrain::cpu
