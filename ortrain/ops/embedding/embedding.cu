// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/dtype_dispatch.h"
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

// The rows of dy that go to the same row of the table are linked in a list, in any order; one block
// per list puts them in order and adds them up in the compute type. So no sum depends on the order
// in which blocks run, and rows of the table without any are written once.
struct Scatter {
  int64_t count, rows, row_size;
  int64_t padding;  // -1: none
  int64_t chunks;   // of columns
  int32_t* head;    // [rows] a row of dy, -1: none
  int32_t* length;  // [rows]
  int32_t* next;    // [count]
};

constexpr int kWidth = 4;                   // columns per thread
constexpr int kAcross = 64;                 // threads next to each other
constexpr int kColumns = kAcross * kWidth;  // of a block
constexpr int kLists = kThreads / kAcross;  // of which each adds up every kLists-th row
constexpr int kShort = 64;  // lists up to this are followed; for others all indices are read
constexpr int kRead = 4;    // indices per thread at a time

template <class T>
__global__ void __launch_bounds__(kItemThreads) begin_scatter(Scatter s, const T* base, T* table) {
  for_each_item(s.rows, [&](int64_t row) {
    s.head[row] = -1;
    s.length[row] = 0;
  });
  if (base == table) return;
  for_each_item(s.rows * s.row_size, [&](int64_t item) {
    table[item] = base != nullptr ? base[item] : static_cast<T>(ComputeType<T>{0});
  });
}

template <class I>
__global__ void __launch_bounds__(kItemThreads)
    link_rows(Scatter s, const I* indices, FaultReporter faults) {
  for_each_item(s.count, [&](int64_t i) {
    const int64_t index = indices[i];
    if (index < 0 || index >= s.rows) {
      faults.report(FaultKind::index, index, i, 0, s.rows);
      return;
    }
    if (index == s.padding) return;
    atomic_add(s.length + index, 1);
    const auto own = static_cast<int32_t>(i);
    int32_t found = s.head[index];
    for (;;) {
      const int32_t before = atomic_compare_exchange(s.head + index, found, own);
      if (before == found) break;
      found = before;
    }
    s.next[i] = found;
  });
}

// The rows of the block's list in order, kThreads * kRead at most at a time.
template <class I>
class ListReader {
 public:
  ORTRAIN_DEVICE ListReader(const Scatter& s, const I* indices, int64_t index)
      : s_(s), indices_(indices), index_(index), left_(s.length[index]) {}

  // Puts some of them into `found`, whose number it returns; 0 after the last. All threads take
  // part, and must be done with what was found before.
  ORTRAIN_DEVICE int read(int32_t* found) {
    if (left_ == 0) return 0;
    return left_ <= kShort && at_ == 0 ? follow(found) : scan(found);
  }

 private:
  ORTRAIN_DEVICE int follow(int32_t* found) {
    int32_t* const unordered = found + kShort;
    if (threadIdx.x == 0) {
      int32_t i = s_.head[index_];
      for (int n = 0; n < left_; ++n) {
        unordered[n] = i;
        i = s_.next[i];
      }
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < left_) {
      const int32_t own = unordered[threadIdx.x];
      int rank = 0;
      for (int n = 0; n < left_; ++n) rank += unordered[n] < own ? 1 : 0;
      found[rank] = own;
    }
    __syncthreads();
    const int count = left_;
    left_ = 0;
    return count;
  }

  ORTRAIN_DEVICE int scan(int32_t* found) {
    __shared__ int ends[kThreads];
    int total = 0;
    while (total == 0) {
      const int64_t first = at_ + threadIdx.x * kRead;
      unsigned hits = 0;
      int own = 0;
      for (int n = 0; n < kRead; ++n) {
        if (first + n < s_.count && indices_[first + n] == index_) {
          hits |= 1u << n;
          ++own;
        }
      }
      ends[threadIdx.x] = own;
      __syncthreads();
      for (int distance = 1; distance < kThreads; distance *= 2) {
        const int below =
            static_cast<int>(threadIdx.x) >= distance ? ends[threadIdx.x - distance] : 0;
        __syncthreads();
        ends[threadIdx.x] += below;
        __syncthreads();
      }
      total = ends[kThreads - 1];
      int to = ends[threadIdx.x] - own;
      for (int n = 0; n < kRead; ++n) {
        if ((hits >> n) & 1u) found[to++] = static_cast<int32_t>(first + n);
      }
      __syncthreads();
      at_ += kThreads * kRead;
    }
    left_ -= total;
    return total;
  }

  const Scatter& s_;
  const I* indices_;
  const int64_t index_;
  int left_;
  int64_t at_ = 0;
};

template <class T>
struct alignas(sizeof(T) * kWidth > 16 ? 16 : sizeof(T) * kWidth) Columns {
  T v[kWidth];
};

// One block per row of dy and chunk of columns; works if that row is the head of a list. `packs`:
// rows may be read kWidth columns at a time.
template <class T, class I>
__global__ void __launch_bounds__(kThreads)
    add_rows(Scatter s, bool packs, const T* dy, const I* indices, T* table) {
  using C = ComputeType<T>;
  __shared__ int32_t found[kThreads * kRead];
  __shared__ C sums[kLists][kColumns];
  const int64_t row = blockIdx.x / s.chunks;
  const int64_t index = indices[row];
  if (index < 0 || index >= s.rows || index == s.padding || s.head[index] != row) return;
  const int own = static_cast<int>(threadIdx.x) % kAcross * kWidth;
  const int64_t column = blockIdx.x % s.chunks * kColumns + own;
  const int64_t left = s.row_size - column;
  const int list = static_cast<int>(threadIdx.x) / kAcross;
  ListReader<I> reader(s, indices, index);
  C sum[kWidth] = {};
  while (const int count = reader.read(found)) {
    if (packs && left > 0) {
#pragma unroll 4
      for (int n = list; n < count; n += kLists) {
        const auto pack = *reinterpret_cast<const Columns<T>*>(dy + found[n] * s.row_size + column);
        ORTRAIN_UNROLL
        for (int e = 0; e < kWidth; ++e) sum[e] += static_cast<C>(pack.v[e]);
      }
    } else if (left > 0) {
      for (int n = list; n < count; n += kLists) {
        const T* const from = dy + found[n] * s.row_size + column;
        ORTRAIN_UNROLL
        for (int e = 0; e < kWidth; ++e) sum[e] += e < left ? static_cast<C>(from[e]) : C{0};
      }
    }
    __syncthreads();
  }
  ORTRAIN_UNROLL
  for (int e = 0; e < kWidth; ++e) sums[list][own + e] = sum[e];
  __syncthreads();
  const int64_t first = blockIdx.x % s.chunks * kColumns;
  for (int c = threadIdx.x; c < kColumns && first + c < s.row_size; c += kThreads) {
    C total = 0;
    for (int other = 0; other < kLists; ++other) total += sums[other][c];
    T& target = table[index * s.row_size + first + c];
    target = static_cast<T>(static_cast<C>(target) + total);
  }
}

KernelFn make_scatter(NodeSpec& spec) {
  const Dims& dims = spec.output(0).dims;
  Scatter scatter{.count = spec.input(1).numel(),
                  .rows = dims[0],
                  .row_size = num_elements(Dims(dims.begin() + 1, dims.end())),
                  .padding = spec.attrs().int_("padding_idx")};
  scatter.chunks = (scatter.row_size + kColumns - 1) / kColumns;
  spec.request_workspace(bytes_of<int32_t>(2, scatter.rows) + bytes_of<int32_t>(scatter.count));
  const bool has_base = spec.has_input(3);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return dispatch_index(spec.input(1).dtype, [&](auto index_tag) -> KernelFn {
      using I = typename decltype(index_tag)::type;
      return [=](const KernelArgs& args) {
        Scatter s = scatter;
        s.head = static_cast<int32_t*>(args.workspace);
        s.length = s.head + s.rows;
        s.next = s.length + s.rows;
        T* const table = args.output<T>(0);
        launch(begin_scatter<T>, items(s.rows * std::max<int64_t>(s.row_size, 1)), args.stream, s,
               has_base ? args.input<T>(3) : nullptr, table);
        launch(link_rows<I>, items(s.count), args.stream, s, args.input<I>(1), FaultReporter(args));
        launch(add_rows<T, I>, {.blocks = block_count(s.count * s.chunks), .threads = kThreads},
               args.stream, s,
               s.row_size % kWidth == 0 &&
                   reinterpret_cast<uintptr_t>(args.in[0]) % alignof(Columns<T>) == 0,
               args.input<T>(0), args.input<I>(1), table);
      };
    });
  });
}

std::optional<std::string> too_many(const NodeSpec& spec) {
  const Dims& dims = spec.output(0).dims;
  const int64_t row_size = num_elements(Dims(dims.begin() + 1, dims.end()));
  const int64_t blocks = spec.input(1).numel() * ((row_size + kColumns - 1) / kColumns);
  if (std::max(blocks, spec.input(1).numel()) < int64_t{1} << 31) return std::nullopt;
  return "more indices than the kernel counts";
}

}  // namespace

void register_embedding(KernelRegistry& registry) {
  registry.add("ortrain::Embedding", {{.name = "rows", .make = make_gather}});
  registry.add("ortrain::EmbeddingGrad",
               {{.name = "lists", .why_not = too_many, .make = make_scatter, .inplace = {{3, 0}}}});
}

}  // namespace ortrain::gpu
