// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/gpu/index_lists.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

constexpr int kThreads = 256;

// --- y = weight[indices]

// The most bytes of which rows at these addresses are whole multiples.
size_t pack_bytes(size_t row_bytes, const void* a, const void* b) {
  const auto address = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b);
  size_t bytes = 16;
  while (row_bytes % bytes != 0 || address % bytes != 0) bytes /= 2;
  return bytes;
}

template <int kBytes>
struct alignas(kBytes) Bytes {
  unsigned char v[kBytes];
};

struct Gather {
  int64_t count, rows, packs;  // packs in a row
  int per_row;                 // threads, a power of two
  FaultReporter faults;
};

template <class I, class Pack>
__global__ void __launch_bounds__(kThreads)
    gather_rows(Gather g, const Pack* weight, const I* indices, Pack* y) {
  const int rows_at_once = kThreads / g.per_row;
  const int place = static_cast<int>(threadIdx.x) % g.per_row;
  for (int64_t i = int64_t{blockIdx.x} * rows_at_once + threadIdx.x / g.per_row; i < g.count;
       i += int64_t{gridDim.x} * rows_at_once) {
    int64_t index = indices[i];
    if (index < 0 || index >= g.rows) {
      if (place == 0) g.faults.report(FaultKind::index, index, i, 0, g.rows);
      if (g.rows == 0) continue;
      index = 0;
    }
    for (int64_t p = place; p < g.packs; p += g.per_row) {
      y[i * g.packs + p] = weight[index * g.packs + p];
    }
  }
}

template <class I, int kBytes>
void launch_gather(Gather g, size_t row_bytes, const KernelArgs& args) {
  using Pack = Bytes<kBytes>;
  g.packs = static_cast<int64_t>(row_bytes / kBytes);
  g.per_row = 1;
  while (g.per_row < kThreads && g.per_row < g.packs) g.per_row *= 2;
  g.faults = FaultReporter(args);
  launch(gather_rows<I, Pack>, items(g.count * g.per_row, kThreads, 1 << 16), args.stream, g,
         args.input<Pack>(0), args.input<I>(1), args.output<Pack>(0));
}

KernelFn make_gather(NodeSpec& spec) {
  const TensorSpec& weight = spec.input(0);
  const int64_t row_size = num_elements(Dims(weight.dims.begin() + 1, weight.dims.end()));
  const size_t row_bytes = static_cast<size_t>(row_size) * size_of(weight.dtype);
  const Gather g{.count = spec.input(1).numel(), .rows = weight.dims[0], .packs = 0, .per_row = 1};
  return dispatch_index(spec.input(1).dtype, [&](auto tag) -> KernelFn {
    using I = typename decltype(tag)::type;
    return [=](const KernelArgs& args) {
      // Rows of nothing have their indices checked too.
      const size_t bytes = row_bytes == 0 ? 2 : pack_bytes(row_bytes, args.in[0], args.out[0]);
      if (bytes == 16) return launch_gather<I, 16>(g, row_bytes, args);
      if (bytes == 8) return launch_gather<I, 8>(g, row_bytes, args);
      if (bytes == 4) return launch_gather<I, 4>(g, row_bytes, args);
      launch_gather<I, 2>(g, row_bytes, args);
    };
  });
}

// --- dweight = base + the rows of dy at their indices

struct Scatter {
  int64_t count, rows, row_size;
  int64_t padding;  // -1: none
};

template <class I>
__global__ void __launch_bounds__(kItemThreads)
    find_rows(Scatter s, const I* indices, FaultReporter faults, TargetSink sink) {
  for_each_item(s.count, [&](int64_t i) {
    const int64_t index = indices[i];
    const bool inside = index >= 0 && index < s.rows;
    if (!inside) faults.report(FaultKind::index, index, i, 0, s.rows);
    sink.put(i, inside && index != s.padding ? index : -1);
  });
}

KernelFn make_scatter(NodeSpec& spec) {
  const Dims& dims = spec.output(0).dims;
  const Scatter s{.count = spec.input(1).numel(),
                  .rows = dims[0],
                  .row_size = num_elements(Dims(dims.begin() + 1, dims.end())),
                  .padding = spec.attrs().int_("padding_idx")};
  const JoinByIndex join(spec.output(0).dtype, {1, s.count, s.rows, s.row_size});
  spec.request_workspace(join.workspace_bytes());
  const bool has_base = spec.has_input(3);
  return dispatch_index(spec.input(1).dtype, [&](auto tag) -> KernelFn {
    using I = typename decltype(tag)::type;
    return [=](const KernelArgs& args) {
      launch(find_rows<I>, items(s.count), args.stream, s, args.input<I>(1), FaultReporter(args),
             join.begin(args.workspace, args.stream));
      join.finish(Reduction::add, has_base ? args.in[3] : nullptr, args.in[0], args.out[0],
                  args.workspace, args.stream);
    };
  });
}

std::optional<std::string> too_many(const NodeSpec& spec) {
  return JoinByIndex::refusal(spec.input(1).numel(), spec.output(0).dims[0]);
}

}  // namespace

void register_embedding(KernelRegistry& registry) {
  registry.add("ortrain::Embedding", {{.name = "rows", .make = make_gather}});
  registry.add("ortrain::EmbeddingGrad",
               {{.name = "lists", .why_not = too_many, .make = make_scatter, .inplace = {{3, 0}}}});
}

}  // namespace ortrain::gpu
