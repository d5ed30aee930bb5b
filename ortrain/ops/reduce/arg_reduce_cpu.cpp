// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/axis_lines.h"
#include "ortrain/cpu/simd/reduce_runs.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

// Whether x takes the place of `best`. NaN beats every number; among equals the first or last wins.
template <bool kLargest, typename C>
bool replaces(C x, C best, bool last) {
  const bool x_is_nan = x != x;
  if (best != best) return x_is_nan && last;
  if (x_is_nan) return true;
  if (last && x == best) return true;
  return kLargest ? x > best : x < best;
}

// A line in one piece: its extreme value by SIMD, then the first or last place that has it.
template <bool kLargest, typename T>
int64_t extreme_position(const T* x, int64_t n, bool last) {
  const double extreme =
      reduce_run(kLargest ? ReduceKind::maximum : ReduceKind::minimum, x, n);
  const T wanted = static_cast<T>(extreme);
  const bool nan = wanted != wanted;
  const auto hits = [&](int64_t i) { return nan ? x[i] != x[i] : x[i] == wanted; };
  if (last) {
    for (int64_t i = n; i-- > 0;) {
      if (hits(i)) return i;
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    if (hits(i)) return i;
  }
  return 0;
}

template <bool kLargest, typename T>
KernelFn arg_reduce_of(const NodeSpec& spec) {
  const AxisLines a = axis_lines(spec.input(0).dims, spec.attrs().int_("axis"));
  const bool last = spec.attrs().int_("select_last_index") != 0;
  return [a, last](const KernelArgs& args) {
    using C = ComputeType<T>;
    const T* x = args.input<T>(0);
    int64_t* out = args.output<int64_t>(0);
    for_each_line_block(a, [&](int64_t o, int64_t i, int64_t width) {
      if constexpr (std::is_floating_point_v<T>) {
        if (a.inner == 1) {
          out[o] = extreme_position<kLargest>(x + o * a.length, a.length, last);
          return;
        }
      }
      const T* from = x + o * a.length * a.inner + i;
      C best[kLineBlock];
      int64_t* at = out + o * a.inner + i;
      for (int64_t c = 0; c < width; ++c) {
        best[c] = static_cast<C>(from[c]);
        at[c] = 0;
      }
      for (int64_t j = 1; j < a.length; ++j) {
        for (int64_t c = 0; c < width; ++c) {
          const C value = static_cast<C>(from[j * a.inner + c]);
          if (!replaces<kLargest>(value, best[c], last)) continue;
          best[c] = value;
          at[c] = j;
        }
      }
    });
  };
}

template <bool kLargest>
KernelFn make_arg_reduce(NodeSpec& spec) {
  return dispatch_all(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, bool>) {
      throw DTypeError("no kernel for bool");
    } else {
      return arg_reduce_of<kLargest, T>(spec);
    }
  });
}

}  // namespace

void register_arg_reduce(KernelRegistry& registry);
void register_arg_reduce(KernelRegistry& registry) {
  registry.add("ArgMax", {{.name = "ref", .make = make_arg_reduce<true>}});
  registry.add("ArgMin", {{.name = "ref", .make = make_arg_reduce<false>}});
}

}  // namespace ortrain::cpu
