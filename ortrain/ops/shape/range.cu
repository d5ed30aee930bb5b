// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

template <class T>
__global__ void __launch_bounds__(kItemThreads)
    range(int64_t count, const T* start, const T* delta, T* out) {
  const T first = *start;
  const T step = *delta;
  for_each_item(count, [&](int64_t i) {
    if constexpr (std::is_integral_v<T>) {
      // Each result fits; the products on the way wrap around and back.
      out[i] = static_cast<T>(static_cast<uint64_t>(first) +
                              static_cast<uint64_t>(i) * static_cast<uint64_t>(step));
    } else {
      out[i] = first + static_cast<T>(i) * step;
    }
  });
}

template <class T>
KernelFn range_of(const NodeSpec& spec) {
  return [count = spec.output(0).numel()](const KernelArgs& args) {
    launch(range<T>, items(count), args.stream, count, args.input<T>(0), args.input<T>(2),
           args.output<T>(0));
  };
}

KernelFn make_range(NodeSpec& spec) {
  switch (spec.input(0).dtype) {
    case DType::f32:
      return range_of<float>(spec);
    case DType::f64:
      return range_of<double>(spec);
    case DType::i16:
      return range_of<int16_t>(spec);
    case DType::i32:
      return range_of<int32_t>(spec);
    case DType::i64:
      return range_of<int64_t>(spec);
    default:
      throw DTypeError(str("no kernel for ", name_of(spec.input(0).dtype)));
  }
}

}  // namespace

void register_range(KernelRegistry& registry) {
  registry.add("Range", {{.name = "elements", .make = make_range}});
}

}  // namespace ortrain::gpu
