// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

template <typename T>
KernelFn range_of(const NodeSpec& spec) {
  return [count = spec.output(0).numel()](const KernelArgs& args) {
    const T start = *args.input<T>(0);
    const T delta = *args.input<T>(2);
    T* out = args.output<T>(0);
    parallel_for(count, 16384, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if constexpr (std::is_integral_v<T>) {
          // Each result fits; the products on the way wrap around and back.
          out[i] = static_cast<T>(static_cast<uint64_t>(start) +
                                  static_cast<uint64_t>(i) * static_cast<uint64_t>(delta));
        } else {
          out[i] = start + static_cast<T>(i) * delta;
        }
      }
    });
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

void register_range(KernelRegistry& registry);
void register_range(KernelRegistry& registry) {
  registry.add("Range", {{.name = "ref", .make = make_range}});
}

}  // namespace ortrain::cpu
