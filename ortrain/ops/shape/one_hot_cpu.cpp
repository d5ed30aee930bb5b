// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/strided_copy.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

// The position an index marks, or -1 when it lies outside of [-depth, depth) or is no integer.
template <typename T>
int64_t hot_position(T index, int64_t depth) {
  if constexpr (std::is_floating_point_v<ComputeType<T>>) {
    const double value = static_cast<double>(static_cast<ComputeType<T>>(index));
    const double bound = static_cast<double>(depth);
    if (!(value >= -bound && value < bound)) return -1;
    const int64_t whole = static_cast<int64_t>(value);
    if (static_cast<double>(whole) != value) return -1;
    return whole < 0 ? whole + depth : whole;
  } else if constexpr (std::is_unsigned_v<T>) {
    return static_cast<uint64_t>(index) < static_cast<uint64_t>(depth)
               ? static_cast<int64_t>(index)
               : -1;
  } else {
    const int64_t value = index;
    if (value < -depth || value >= depth) return -1;
    return value < 0 ? value + depth : value;
  }
}

template <typename T>
KernelFn one_hot_of(NodeSpec& spec) {
  const Dims& dims = spec.output(0).dims;
  const int64_t axis = normalize_axis(spec.attrs().int_("axis"), dims.size());
  const int64_t depth = dims[static_cast<size_t>(axis)];
  const int64_t inner = num_elements(Dims(dims.begin() + axis + 1, dims.end()));
  const int64_t indices = spec.input(0).numel();
  const size_t size = size_of(spec.output(0).dtype);
  return [=, total = spec.output(0).numel()](const KernelArgs& args) {
    const T* index = args.input<T>(0);
    const std::byte* off = args.input<std::byte>(2);
    std::byte* out = args.output<std::byte>(0);
    fill_elements(out, total, size, off);
    for (int64_t i = 0; i < indices; ++i) {
      const int64_t at = hot_position(index[i], depth);
      if (at < 0) continue;
      const int64_t element = ((i / inner) * depth + at) * inner + i % inner;
      std::memcpy(out + static_cast<size_t>(element) * size, off + size, size);
    }
  };
}

KernelFn make_one_hot(NodeSpec& spec) {
  return dispatch_all(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, bool>) {
      throw DTypeError("indices cannot be bool");
    } else {
      return one_hot_of<T>(spec);
    }
  });
}

}  // namespace

void register_one_hot(KernelRegistry& registry);
void register_one_hot(KernelRegistry& registry) {
  registry.add("OneHot", {{.name = "ref", .make = make_one_hot}});
}

}  // namespace ortrain::cpu
