// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <numeric>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/index_check.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

// Data as [outer, extent, inner], the result as [outer, indices, inner].
struct GatherShape {
  int64_t axis = 0, outer = 1, extent = 1, inner = 1, indices = 1;
};

GatherShape gather_shape(const Dims& data, int64_t axis, int64_t indices) {
  GatherShape shape;
  shape.axis = normalize_axis(axis, data.size());
  const auto split = data.begin() + shape.axis;
  shape.outer = num_elements(Dims(data.begin(), split));
  shape.extent = *split;
  shape.inner = num_elements(Dims(split + 1, data.end()));
  shape.indices = indices;
  return shape;
}

// Element copies of a size known to the compiler, memcpy for longer slices.
template <size_t kBytes>
void copy_slice(std::byte* to, const std::byte* from, size_t bytes) {
  std::memcpy(to, from, kBytes == 0 ? bytes : kBytes);
}

template <typename I, size_t kBytes>
KernelFn gather_of(const NodeSpec& spec, const GatherShape& s, size_t slice_bytes) {
  return [=, context = spec.context()](const KernelArgs& args) {
    const std::byte* data = args.input<std::byte>(0);
    const I* indices = args.input<I>(1);
    std::byte* out = args.output<std::byte>(0);
    check_indices(indices, s.indices, s.extent, s.axis, context);
    const int64_t grain = 65536 / static_cast<int64_t>(slice_bytes) + 1;
    parallel_for(s.outer * s.indices, grain, [&](int64_t begin, int64_t end) {
      int64_t o = begin / s.indices, i = begin % s.indices;
      for (int64_t slice = begin; slice < end; ++slice) {
        const int64_t source = o * s.extent + wrapped(indices[i], s.extent);
        copy_slice<kBytes>(out + static_cast<size_t>(slice) * slice_bytes,
                           data + static_cast<size_t>(source) * slice_bytes, slice_bytes);
        if (++i == s.indices) {
          i = 0;
          ++o;
        }
      }
    });
  };
}

KernelFn make_gather(NodeSpec& spec) {
  const GatherShape s =
      gather_shape(spec.input(0).dims, spec.attrs().int_("axis"), spec.input(1).numel());
  const size_t bytes = static_cast<size_t>(s.inner) * size_of(spec.input(0).dtype);
  return dispatch_index(spec.input(1).dtype, [&](auto tag) -> KernelFn {
    using I = typename decltype(tag)::type;
    if (spec.output(0).numel() == 0) {
      return [s, context = spec.context()](const KernelArgs& args) {
        check_indices(args.input<I>(1), s.indices, s.extent, s.axis, context);
      };
    }
    if (bytes == 4) return gather_of<I, 4>(spec, s, bytes);
    if (bytes == 8) return gather_of<I, 8>(spec, s, bytes);
    return gather_of<I, 0>(spec, s, bytes);
  });
}

// The gradient goes row by row of dx: a counting sort lists which slices of dy point to each row,
// in order; their sum is written once. No two threads write one row, so nothing depends on how
// many there are, and 16-bit types add in float.
constexpr int64_t kColumns = 256;

template <typename T>
void add_row(const T* dy, const int64_t* sources, int64_t begin, int64_t end, int64_t inner,
             T* dx) {
  if (begin == end) {
    std::memset(static_cast<void*>(dx), 0, static_cast<size_t>(inner) * sizeof(T));
    return;
  }
  if (begin + 1 == end) {
    std::memcpy(static_cast<void*>(dx), dy + sources[begin] * inner,
                static_cast<size_t>(inner) * sizeof(T));
    return;
  }
  for (int64_t column = 0; column < inner; column += kColumns) {
    const int64_t width = std::min(kColumns, inner - column);
    ComputeType<T> sums[kColumns];
    for (int64_t c = 0; c < width; ++c) sums[c] = 0;
    for (int64_t i = begin; i < end; ++i) {
      const T* from = dy + sources[i] * inner + column;
      for (int64_t c = 0; c < width; ++c) sums[c] += static_cast<ComputeType<T>>(from[c]);
    }
    for (int64_t c = 0; c < width; ++c) dx[column + c] = static_cast<T>(sums[c]);
  }
}

template <typename T, typename I>
KernelFn gather_grad_of(NodeSpec& spec, const GatherShape& s) {
  // starts[extent + 1], then the sorted positions.
  spec.request_workspace(bytes_of<int64_t>(s.extent) + bytes_of<int64_t>(1) +
                         bytes_of<int64_t>(s.indices));
  return [s, context = spec.context()](const KernelArgs& args) {
    const T* dy = args.input<T>(0);
    const I* indices = args.input<I>(1);
    T* dx = args.output<T>(0);
    check_indices(indices, s.indices, s.extent, s.axis, context);
    int64_t* starts = static_cast<int64_t*>(args.workspace);
    int64_t* sorted = starts + s.extent + 1;
    std::fill_n(starts, s.extent + 1, 0);
    for (int64_t i = 0; i < s.indices; ++i) ++starts[wrapped(indices[i], s.extent)];
    std::partial_sum(starts, starts + s.extent + 1, starts);
    // Backwards, so that each list ends up in order and starts at its place.
    for (int64_t i = s.indices; i-- > 0;) sorted[--starts[wrapped(indices[i], s.extent)]] = i;
    const int64_t per_row = s.inner * (1 + s.indices / s.extent);
    parallel_for(s.outer * s.extent, 16384 / std::max<int64_t>(per_row, 1) + 1,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row) {
                     const int64_t o = row / s.extent, v = row % s.extent;
                     add_row(dy + o * s.indices * s.inner, sorted, starts[v], starts[v + 1],
                             s.inner, dx + row * s.inner);
                   }
                 });
  };
}

KernelFn make_gather_grad(NodeSpec& spec) {
  const GatherShape s =
      gather_shape(spec.output(0).dims, spec.attrs().int_("axis"), spec.input(1).numel());
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return dispatch_index(spec.input(1).dtype, [&](auto index_tag) -> KernelFn {
      using I = typename decltype(index_tag)::type;
      if (spec.output(0).numel() == 0) {
        return [s, context = spec.context()](const KernelArgs& args) {
          check_indices(args.input<I>(1), s.indices, s.extent, s.axis, context);
        };
      }
      return gather_grad_of<T, I>(spec, s);
    });
  });
}

}  // namespace

void register_gather(KernelRegistry& registry);
void register_gather(KernelRegistry& registry) {
  registry.add("Gather", {{.name = "ref", .make = make_gather}});
  registry.add("ortrain::GatherGrad", {{.name = "ref", .make = make_gather_grad}});
}

}  // namespace ortrain::cpu
