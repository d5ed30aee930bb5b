// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "ortrain/gpu/launch.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

constexpr int kAtOnce = 64;
using Numbers = DeviceArray<int64_t, kAtOnce>;

__global__ void write_numbers(Numbers numbers, int64_t count, int64_t* out) {
  for_each_item(count, [&](int64_t i) { out[i] = numbers[static_cast<int>(i)]; });
}

// The result follows from the spec alone: it goes as an argument.
KernelFn write_constants(std::vector<int64_t> values) {
  return [values = std::move(values)](const KernelArgs& args) {
    for (size_t begin = 0; begin < values.size(); begin += kAtOnce) {
      const auto count = static_cast<int64_t>(std::min<size_t>(kAtOnce, values.size() - begin));
      Numbers numbers;
      std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(begin), count, numbers.values);
      launch(write_numbers, {.threads = kAtOnce}, args.stream, numbers, count,
             args.output<int64_t>(0) + begin);
    }
  };
}

KernelFn make_shape(NodeSpec& spec) {
  const Dims& dims = spec.input(0).dims;
  const int64_t rank = spec.input(0).rank();
  int64_t start = spec.attrs().int_("start");
  if (start < 0) start += rank;
  start = std::clamp<int64_t>(start, 0, rank);
  return write_constants({dims.begin() + start, dims.begin() + start + spec.output(0).numel()});
}

KernelFn make_size(NodeSpec& spec) { return write_constants({spec.input(0).numel()}); }

}  // namespace

void register_shape(KernelRegistry& registry) {
  registry.add("Shape", {{.name = "constants", .make = make_shape}});
  registry.add("Size", {{.name = "constants", .make = make_size}});
}

}  // namespace ortrain::gpu
