// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/axis_lines.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

template <typename T, typename A>
T rounded(A value) {
  if constexpr (sizeof(T) == 2) {
    return T(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

// Floats add in double; integers modulo 2^64.
template <typename T>
KernelFn cum_sum_of(const NodeSpec& spec, int64_t axis) {
  const AxisLines a = axis_lines(spec.input(0).dims, axis);
  const bool exclusive = spec.attrs().int_("exclusive") != 0;
  const bool reverse = spec.attrs().int_("reverse") != 0;
  return [=](const KernelArgs& args) {
    using A = std::conditional_t<std::is_integral_v<T>, uint64_t, double>;
    const T* x = args.input<T>(0);
    T* y = args.output<T>(0);
    for_each_line_block(a, [&](int64_t o, int64_t i, int64_t width) {
      if (a.inner == 1) {
        A sum = 0;
        for (int64_t j = 0; j < a.length; ++j) {
          const int64_t at = o * a.length + (reverse ? a.length - 1 - j : j);
          const A before = sum;
          sum += static_cast<A>(static_cast<ComputeType<T>>(x[at]));
          y[at] = rounded<T>(exclusive ? before : sum);
        }
        return;
      }
      A sums[kLineBlock] = {};
      for (int64_t step = 0; step < a.length; ++step) {
        const int64_t j = reverse ? a.length - 1 - step : step;
        const int64_t at = (o * a.length + j) * a.inner + i;
        for (int64_t c = 0; c < width; ++c) {
          const A value = static_cast<A>(static_cast<ComputeType<T>>(x[at + c]));
          const A before = sums[c];
          sums[c] += value;
          y[at + c] = rounded<T>(exclusive ? before : sums[c]);
        }
      }
    });
  };
}

KernelFn make_cum_sum(NodeSpec& spec) {
  const std::optional<std::vector<int64_t>> axis = spec.constant_ints(1);
  check(axis.has_value(), "the axis is known when a kernel is made");
  switch (spec.input(0).dtype) {
    case DType::i32: return cum_sum_of<int32_t>(spec, axis->front());
    case DType::i64: return cum_sum_of<int64_t>(spec, axis->front());
    case DType::u32: return cum_sum_of<uint32_t>(spec, axis->front());
    case DType::u64: return cum_sum_of<uint64_t>(spec, axis->front());
    default:
      return dispatch_float(spec.input(0).dtype, [&](auto tag) {
        return cum_sum_of<typename decltype(tag)::type>(spec, axis->front());
      });
  }
}

}  // namespace

void register_cum_sum(KernelRegistry& registry);
void register_cum_sum(KernelRegistry& registry) {
  registry.add("CumSum", {{.name = "ref", .make = make_cum_sum, .inplace = {{0, 0}}}});
}

}  // namespace ortrain::cpu
