// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/strided_copy.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

std::vector<size_t> permutation(const NodeSpec& spec) {
  const size_t rank = spec.input(0).dims.size();
  const std::optional<std::vector<int64_t>> perm = spec.attrs().optional_ints("perm");
  std::vector<size_t> result(rank);
  for (size_t i = 0; i < rank; ++i) {
    result[i] = perm ? static_cast<size_t>((*perm)[i]) : rank - 1 - i;
  }
  return result;
}

KernelFn make_transpose(NodeSpec& spec) {
  const Dims in = strides_of(spec.input(0).dims);
  Dims strides;
  for (size_t axis : permutation(spec)) strides.push_back(in[axis]);
  StridedCopy copy(size_of(spec.input(0).dtype), spec.output(0).dims, std::move(strides),
                   strides_of(spec.output(0).dims));
  return [copy = std::move(copy)](const KernelArgs& args) { copy.run(args.in[0], args.out[0]); };
}

// Axes of extent 1 may move freely: no element does.
Kernel view_if_order_stays() {
  Kernel kernel = whole_input_view();
  kernel.view = [whole = kernel.view](const NodeSpec& spec) -> decltype(kernel.view(spec)) {
    size_t last = 0;
    for (size_t axis : permutation(spec)) {
      if (spec.input(0).dims[axis] == 1) continue;
      if (axis < last) return std::nullopt;
      last = axis;
    }
    return whole(spec);
  };
  return kernel;
}

}  // namespace

void register_transpose(KernelRegistry& registry);
void register_transpose(KernelRegistry& registry) {
  registry.add("Transpose", {view_if_order_stays(), {.name = "ref", .make = make_transpose}});
}

}  // namespace ortrain::cpu
