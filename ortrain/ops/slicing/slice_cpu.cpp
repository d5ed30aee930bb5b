// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/strided_copy.h"
#include "ortrain/ops/slicing/slice_region.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

constexpr int64_t kAlignment = 64;

// The box of a tensor of shape `whole`: offset and strides in elements.
struct Box {
  Dims strides;
  int64_t offset = 0;
};

Box sliced_box(const NodeSpec& spec, const Dims& whole, size_t first) {
  const auto ints = [&spec](size_t i) -> std::optional<std::vector<int64_t>> {
    if (!spec.has_input(i)) return std::nullopt;
    std::optional<std::vector<int64_t>> contents = spec.constant_ints(i);
    check(contents.has_value(), "the bounds of a slice are known when a kernel is made");
    return contents;
  };
  const std::vector<ops::AxisSlice> slices = ops::slice_axes(
      to_shape(whole), to_shape(*ints(first)), to_shape(*ints(first + 1)), ints(first + 2),
      ints(first + 3));
  Box box{.strides = strides_of(whole)};
  for (size_t i = 0; i < slices.size(); ++i) {
    // An empty slice may start behind the end, and a huge step never gets taken.
    if (slices[i].count.is(0)) return {.strides = Dims(whole.size(), 0)};
    box.offset += slices[i].start.constant() * box.strides[i];
    box.strides[i] = slices[i].count.is(1) ? 0 : box.strides[i] * slices[i].step;
  }
  return box;
}

KernelFn make_slice(NodeSpec& spec) {
  const Box box = sliced_box(spec, spec.input(0).dims, 1);
  const Dims& dims = spec.output(0).dims;
  StridedCopy copy(size_of(spec.input(0).dtype), dims, box.strides, strides_of(dims), box.offset);
  return [copy = std::move(copy)](const KernelArgs& args) { copy.run(args.in[0], args.out[0]); };
}

// A slice is a view if what it keeps lies in one piece.
std::optional<std::vector<int64_t>> slice_view(const NodeSpec& spec) {
  const Dims& dims = spec.output(0).dims;
  if (spec.output(0).numel() == 0) return std::vector<int64_t>{0};
  const Box box = sliced_box(spec, spec.input(0).dims, 1);
  const Dims dense = strides_of(dims);
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] != 1 && box.strides[i] != dense[i]) return std::nullopt;
  }
  const int64_t offset = box.offset * static_cast<int64_t>(size_of(spec.input(0).dtype));
  if (offset % kAlignment != 0) return std::nullopt;
  return std::vector<int64_t>{offset};
}

KernelFn make_slice_grad(NodeSpec& spec) {
  const Dims& dims = spec.input(0).dims;
  const Box box = sliced_box(spec, spec.output(0).dims, 2);
  const size_t size = size_of(spec.input(0).dtype);
  StridedCopy copy(size, dims, strides_of(dims), box.strides, 0, box.offset);
  const int64_t total = spec.output(0).numel();
  const bool covers_all = spec.input(0).numel() == total;
  return [=, copy = std::move(copy)](const KernelArgs& args) {
    const uint64_t zero = 0;
    if (!covers_all) fill_elements(args.out[0], total, size, &zero);
    copy.run(args.in[0], args.out[0]);
  };
}

}  // namespace

void register_slice(KernelRegistry& registry);
void register_slice(KernelRegistry& registry) {
  registry.add("Slice",
               {{.name = "view", .view = slice_view}, {.name = "ref", .make = make_slice}});
  registry.add("ortrain::SliceGrad", {{.name = "ref", .make = make_slice_grad}});
}

}  // namespace ortrain::cpu
