// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/reduction.h"
#include "ortrain/cpu/strided_copy.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

KernelFn run_copy(StridedCopy copy) {
  return [copy = std::move(copy)](const KernelArgs& args) { copy.run(args.in[0], args.out[0]); };
}

KernelFn make_expand(NodeSpec& spec) {
  const Dims& from = spec.input(0).dims;
  const Dims& to = spec.output(0).dims;
  const Dims dense = strides_of(from);
  Dims strides(to.size(), 0);
  const size_t extra = to.size() - from.size();
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i] != 1) strides[extra + i] = dense[i];
  }
  return run_copy(
      StridedCopy(size_of(spec.input(0).dtype), to, std::move(strides), strides_of(to)));
}

// Every axis becomes a repeat of stride 0 and the axis itself.
KernelFn make_tile(NodeSpec& spec) {
  // Without elements, the input's extents are no part of the output's, whose strides may be large.
  if (spec.output(0).numel() == 0) return [](const KernelArgs&) {};
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
  return run_copy(StridedCopy(size_of(spec.input(0).dtype), std::move(dims), std::move(in_strides),
                              std::move(out_strides)));
}

// The axes that the target shape lacks, or has with extent 1.
std::vector<bool> summed_axes(const NodeSpec& spec) {
  const Dims& from = spec.input(0).dims;
  const Dims& to = spec.output(0).dims;
  const size_t extra = from.size() - to.size();
  std::vector<bool> summed(from.size());
  for (size_t i = 0; i < from.size(); ++i) summed[i] = i < extra || to[i - extra] != from[i];
  return summed;
}

KernelFn make_sum_to_shape_blocked(NodeSpec& spec) {
  return make_reduce_blocked(spec, {}, summed_axes(spec));
}

KernelFn make_sum_to_shape_ref(NodeSpec& spec) {
  return make_reduce_ref(spec, {}, summed_axes(spec));
}

// Nothing is repeated: the result is the input in another shape.
Kernel view_if_same_size() {
  Kernel kernel = whole_input_view();
  kernel.view = [whole = kernel.view](const NodeSpec& spec) -> decltype(kernel.view(spec)) {
    if (spec.input(0).numel() != spec.output(0).numel()) return std::nullopt;
    return whole(spec);
  };
  return kernel;
}

}  // namespace

void register_expand(KernelRegistry& registry);
void register_expand(KernelRegistry& registry) {
  registry.add("Expand", {view_if_same_size(), {.name = "ref", .make = make_expand}});
  registry.add("Tile", {view_if_same_size(), {.name = "ref", .make = make_tile}});
  registry.add("ortrain::SumToShape",
               {view_if_same_size(),
                {.name = "blocked", .types = kFloatTypes, .make = make_sum_to_shape_blocked},
                {.name = "ref", .make = make_sum_to_shape_ref}});
}

}  // namespace ortrain::cpu
