// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/strided_copy.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

StridedCopy expansion(const NodeSpec& spec) {
  const Dims& from = spec.input(0).dims;
  const Dims& to = spec.output(0).dims;
  const Dims dense = strides_of(from);
  Dims strides(to.size(), 0);
  const size_t extra = to.size() - from.size();
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i] != 1) strides[extra + i] = dense[i];
  }
  return StridedCopy(size_of(spec.input(0).dtype), to, strides, strides_of(to));
}

// Every axis becomes a repeat of stride 0 and the axis itself.
StridedCopy tiling(const NodeSpec& spec) {
  const Dims& from = spec.input(0).dims;
  const Dims& to = spec.output(0).dims;
  const Dims in = strides_of(from);
  const Dims out = strides_of(to);
  Dims dims, in_strides, out_strides;
  for (size_t i = 0; i < from.size(); ++i) {
    dims.insert(dims.end(), {from[i] == 0 ? 0 : to[i] / from[i], from[i]});
    in_strides.insert(in_strides.end(), {0, in[i]});
    out_strides.insert(out_strides.end(), {out[i] * from[i], out[i]});
  }
  return StridedCopy(size_of(spec.input(0).dtype), dims, in_strides, out_strides);
}

Kernel copy_kernel(StridedCopy (*plan)(const NodeSpec&)) {
  Kernel kernel{.name = "copy"};
  kernel.why_not = [plan](const NodeSpec& spec) { return refusal_of([&] { plan(spec); }); };
  kernel.make = [plan](NodeSpec& spec) -> KernelFn {
    return [copy = plan(spec)](const KernelArgs& args) {
      copy.run(args.in[0], args.out[0], args.stream);
    };
  };
  return kernel;
}

}  // namespace

void register_expand(KernelRegistry& registry) {
  registry.add("Expand", {copy_kernel(expansion)});
  registry.add("Tile", {copy_kernel(tiling)});
}

}  // namespace ortrain::gpu
