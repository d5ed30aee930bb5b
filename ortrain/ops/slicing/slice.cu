// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/strided_copy.h"
#include "ortrain/gpu/window_copy.h"
#include "ortrain/ops/slicing/slice_region.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

// The slices of a tensor of shape `whole`; their inputs begin at `first`.
std::vector<ops::AxisSlice> slices_of(const NodeSpec& spec, const Dims& whole, size_t first) {
  const auto ints = [&spec](size_t i) -> std::optional<std::vector<int64_t>> {
    if (!spec.has_input(i)) return std::nullopt;
    std::optional<std::vector<int64_t>> contents = spec.constant_ints(i);
    check(contents.has_value(), "the bounds of a slice are known when a kernel is made");
    return contents;
  };
  return ops::slice_axes(to_shape(whole), to_shape(*ints(first)), to_shape(*ints(first + 1)),
                         ints(first + 2), ints(first + 3));
}

StridedCopy slice_copy(const NodeSpec& spec) {
  const Dims& dims = spec.output(0).dims;
  const std::vector<ops::AxisSlice> slices = slices_of(spec, spec.input(0).dims, 1);
  Dims strides = strides_of(spec.input(0).dims);
  int64_t offset = 0;
  for (size_t k = 0; k < slices.size(); ++k) {
    if (slices[k].count.is(0)) {  // may start behind the end
      offset = 0;
      strides.assign(strides.size(), 0);
      break;
    }
    offset += slices[k].start.constant() * strides[k];
    // A huge step never gets taken.
    strides[k] = slices[k].count.is(1) ? 0 : strides[k] * slices[k].step;
  }
  return StridedCopy(size_of(spec.input(0).dtype), dims, strides, strides_of(dims), offset);
}

WindowCopy slice_grad_copy(const NodeSpec& spec) {
  const Dims& dims = spec.input(0).dims;
  const Dims strides = strides_of(dims);
  const std::vector<ops::AxisSlice> slices = slices_of(spec, spec.output(0).dims, 2);
  std::vector<WindowAxis> axes;
  int64_t offset = 0;
  for (size_t k = 0; k < slices.size(); ++k) {
    WindowAxis axis{.out_extent = spec.output(0).dims[k],
                    .start = slices[k].start.constant(),
                    .step = 1,
                    .in_extent = dims[k],
                    .in_stride = strides[k]};
    if (dims[k] > 1) axis.step = slices[k].step;
    if (axis.step < 0) {
      axis.start += (dims[k] - 1) * axis.step;
      axis.step = -axis.step;
      offset += (dims[k] - 1) * strides[k];
      axis.in_stride = -strides[k];
    }
    axes.push_back(axis);
  }
  return WindowCopy(size_of(spec.input(0).dtype), std::move(axes), Outside::value, offset);
}

}  // namespace

void register_slice(KernelRegistry& registry) {
  registry.add(
      "Slice",
      {{.name = "copy",
        .why_not = [](const NodeSpec& spec) { return refusal_of([&] { slice_copy(spec); }); },
        .make = [](NodeSpec& spec) -> KernelFn {
          return [copy = slice_copy(spec)](const KernelArgs& args) {
            copy.run(args.in[0], args.out[0], args.stream);
          };
        }}});
  registry.add(
      "ortrain::SliceGrad",
      {{.name = "window",
        .why_not = [](const NodeSpec& spec) { return refusal_of([&] { slice_grad_copy(spec); }); },
        .make = [](NodeSpec& spec) -> KernelFn {
          return [copy = slice_grad_copy(spec)](const KernelArgs& args) {
            copy.run(args.in[0], args.out[0], nullptr, args.stream);
          };
        }}});
}

}  // namespace ortrain::gpu
