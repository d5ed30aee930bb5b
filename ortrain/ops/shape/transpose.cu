// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/strided_copy.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

StridedCopy transposition(const NodeSpec& spec) {
  const Dims& dims = spec.input(0).dims;
  const Dims in = strides_of(dims);
  const std::optional<std::vector<int64_t>> perm = spec.attrs().optional_ints("perm");
  Dims strides;
  for (size_t i = 0; i < dims.size(); ++i) {
    strides.push_back(in[perm ? static_cast<size_t>((*perm)[i]) : dims.size() - 1 - i]);
  }
  const Dims& to = spec.output(0).dims;
  return StridedCopy(size_of(spec.input(0).dtype), to, strides, strides_of(to));
}

}  // namespace

void register_transpose(KernelRegistry& registry) {
  registry.add(
      "Transpose",
      {{.name = "tiles",
        .why_not = [](const NodeSpec& spec) { return refusal_of([&] { transposition(spec); }); },
        .make = [](NodeSpec& spec) -> KernelFn {
          return [copy = transposition(spec)](const KernelArgs& args) {
            copy.run(args.in[0], args.out[0], args.stream);
          };
        }}});
}

}  // namespace ortrain::gpu
