// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "ortrain/base/axis_split.h"
#include "ortrain/gpu/copy_parts.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

// A tensor seen as rows of all that lies behind the axis.
struct RowsOfAxis {
  int64_t rows, row_bytes, slice_bytes;

  RowsOfAxis(const TensorSpec& tensor, int64_t axis) {
    const AxisSplit split(tensor.dims, axis);
    rows = split.outer;
    slice_bytes = split.inner * static_cast<int64_t>(size_of(tensor.dtype));
    row_bytes = split.size * slice_bytes;
  }
};

// Parts are filled in while it runs: they are kept apart per run, on the stack, a launch's worth at
// a time.
template <class Address, class Copy>
void run_in_chunks(const std::vector<Part>& parts, const Address& address, const Copy& copy) {
  std::array<Part, 56> now;
  for (size_t begin = 0; begin < parts.size(); begin += now.size()) {
    const size_t count = std::min(now.size(), parts.size() - begin);
    for (size_t i = 0; i < count; ++i) {
      now[i] = parts[begin + i];
      now[i].data = address(begin + i);
    }
    copy(std::span<const Part>(now.data(), count));
  }
}

KernelFn make_concat(NodeSpec& spec) {
  const int64_t axis = spec.attrs().int_("axis");
  const RowsOfAxis whole(spec.output(0), axis);
  std::vector<Part> parts;
  int64_t offset = 0;
  for (size_t i = 0; i < spec.num_inputs(); ++i) {
    const int64_t bytes = RowsOfAxis(spec.input(i), axis).row_bytes;
    parts.push_back({nullptr, bytes, offset});
    offset += bytes;
  }
  return [whole, parts = std::move(parts)](const KernelArgs& args) {
    run_in_chunks(
        parts, [&](size_t i) { return args.in[i]; },
        [&](std::span<const Part> now) {
          join_parts(now, args.out[0], whole.rows, whole.row_bytes, args.stream);
        });
  };
}

KernelFn make_split(NodeSpec& spec) {
  const int64_t axis = spec.attrs().int_("axis");
  const RowsOfAxis whole(spec.input(0), axis);
  const auto at = static_cast<size_t>(normalize_axis(axis, spec.input(0).dims.size()));
  const int64_t extent = spec.input(0).dims[at];
  std::optional<std::vector<int64_t>> sizes;
  if (spec.has_input(1)) {
    sizes = spec.constant_ints(1);
    check(sizes.has_value(), "input 'split' is known when a kernel is made");
  }
  const int64_t count =
      spec.attrs().optional_int("num_outputs").value_or(static_cast<int64_t>(spec.num_outputs()));
  const int64_t chunk = (extent + count - 1) / count;
  std::vector<Part> parts;
  int64_t start = 0;
  for (size_t i = 0; i < spec.num_outputs(); ++i) {
    const int64_t size =
        sizes ? (*sizes)[i] : std::max<int64_t>(0, std::min(chunk, extent - start));
    const int64_t bytes = spec.has_output(i) ? size * whole.slice_bytes : 0;
    parts.push_back({nullptr, bytes, start * whole.slice_bytes});
    start += size;
  }
  return [whole, parts = std::move(parts)](const KernelArgs& args) {
    run_in_chunks(
        parts, [&](size_t i) { return args.out[i]; },
        [&](std::span<const Part> now) {
          cut_parts(now, args.in[0], whole.rows, whole.row_bytes, args.stream);
        });
  };
}

}  // namespace

void register_concat(KernelRegistry& registry) {
  registry.add("Concat", {{.name = "parts", .make = make_concat}});
  registry.add("Split", {{.name = "parts", .make = make_split}});
}

}  // namespace ortrain::gpu
