// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "ortrain/base/axis_split.h"
#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/words.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

// The position an index marks, or -1 when it lies outside of [-depth, depth) or is no integer.
template <class I>
ORTRAIN_DEVICE int64_t hot_position(I index, int64_t depth) {
  if constexpr (std::is_floating_point_v<ComputeType<I>>) {
    const double value = static_cast<double>(static_cast<ComputeType<I>>(index));
    const double bound = static_cast<double>(depth);
    if (!(value >= -bound && value < bound)) return -1;
    const int64_t whole = static_cast<int64_t>(value);
    if (static_cast<double>(whole) != value) return -1;
    return whole < 0 ? whole + depth : whole;
  } else if constexpr (std::is_unsigned_v<I>) {
    return static_cast<uint64_t>(index) < static_cast<uint64_t>(depth) ? static_cast<int64_t>(index)
                                                                       : -1;
  } else {
    const int64_t value = index;
    if (value < -depth || value >= depth) return -1;
    return value < 0 ? value + depth : value;
  }
}

template <class I, int kSize>
__global__ void __launch_bounds__(kItemThreads)
    one_hot(AxisSplit split, int64_t count, const I* indices, const void* values, void* address) {
  using Word = typename WordOf<kSize>::type;
  const Word off = static_cast<const Word*>(values)[0];
  const Word on = static_cast<const Word*>(values)[1];
  Word* out = static_cast<Word*>(address);
  for_each_item(count, [&](int64_t i) {
    const int64_t line = i / split.inner;
    const int64_t outer = line / split.size;
    const I index = indices[outer * split.inner + (i - line * split.inner)];
    out[i] = hot_position(index, split.size) == line - outer * split.size ? on : off;
  });
}

template <class I>
KernelFn one_hot_of(NodeSpec& spec) {
  return [split = AxisSplit(spec.output(0).dims, spec.attrs().int_("axis")),
          count = spec.output(0).numel(),
          size = size_of(spec.output(0).dtype)](const KernelArgs& args) {
    const auto run = [&](auto bytes) {
      launch(one_hot<I, decltype(bytes)::value>, items(count), args.stream, split, count,
             args.input<I>(0), args.in[2], args.out[0]);
    };
    switch (size) {
      case 1:
        return run(std::integral_constant<int, 1>());
      case 2:
        return run(std::integral_constant<int, 2>());
      case 4:
        return run(std::integral_constant<int, 4>());
      default:
        return run(std::integral_constant<int, 8>());
    }
  };
}

KernelFn make_one_hot(NodeSpec& spec) {
  return dispatch_all(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using I = typename decltype(tag)::type;
    if constexpr (std::is_same_v<I, bool>) {
      throw DTypeError("indices cannot be bool");
    } else {
      return one_hot_of<I>(spec);
    }
  });
}

}  // namespace

void register_one_hot(KernelRegistry& registry) {
  registry.add("OneHot", {{.name = "elements", .make = make_one_hot}});
}

}  // namespace ortrain::gpu
