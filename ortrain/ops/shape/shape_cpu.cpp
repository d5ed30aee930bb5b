// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

// The result follows from the spec alone: it is burned in.
KernelFn write_constants(std::vector<int64_t> values) {
  return [values = std::move(values)](const KernelArgs& args) {
    std::copy(values.begin(), values.end(), args.output<int64_t>(0));
  };
}

KernelFn make_shape(NodeSpec& spec) {
  const Dims& dims = spec.input(0).dims;
  const int64_t rank = spec.input(0).rank();
  int64_t start = spec.attrs().int_("start");
  if (start < 0) start += rank;
  start = std::clamp<int64_t>(start, 0, rank);
  return write_constants(
      {dims.begin() + start, dims.begin() + start + spec.output(0).numel()});
}

KernelFn make_size(NodeSpec& spec) { return write_constants({spec.input(0).numel()}); }

}  // namespace

void register_shape(KernelRegistry& registry);
void register_shape(KernelRegistry& registry) {
  registry.add("Shape", {{.name = "ref", .make = make_shape}});
  registry.add("Size", {{.name = "ref", .make = make_size}});
}

}  // namespace ortrain::cpu
