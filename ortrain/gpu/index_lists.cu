// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/gpu/index_lists.h"
#include "ortrain/gpu/reduce.h"
#include "ortrain/gpu/strided_copy.h"
#include "ortrain/gpu/words.h"

namespace ortrain::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 8;
constexpr int64_t kPerBlock = int64_t{kThreads} * kPerThread;
// Longer lists are read off the targets in order instead of being sorted.
constexpr int32_t kSortedLists = 1024;

// The sum of the values of lower lanes.
ORTRAIN_DEVICE int32_t sum_below(int32_t value) {
  int32_t sum = value;
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int32_t below = exchange_up(sum, distance);
    if (lane() >= distance) sum += below;
  }
  return sum - value;
}

// Prefix sums inside of blocks, and the sum of each block.
__global__ void __launch_bounds__(kThreads)
    scan_blocks(int64_t count, const int32_t* counts, int32_t* starts, int32_t* totals) {
  __shared__ int32_t sums[kThreads / kWarpSize];
  const int64_t first = blockIdx.x * kPerBlock + int64_t{threadIdx.x} * kPerThread;
  int32_t values[kPerThread];
  int32_t sum = 0;
  for (int k = 0; k < kPerThread; ++k) {
    values[k] = first + k < count ? counts[first + k] : 0;
    sum += values[k];
  }
  int32_t before = sum_below(sum);
  if (lane() == kWarpSize - 1) sums[warp()] = before + sum;
  __syncthreads();
  for (int w = 0; w < warp(); ++w) before += sums[w];
  if (threadIdx.x == kThreads - 1) totals[blockIdx.x] = before + sum;
  for (int k = 0; k < kPerThread; ++k) {
    if (first + k < count) starts[first + k] = before;
    before += values[k];
  }
}

// Adds the sums of the blocks in front; `next` gets a copy of the starts.
__global__ void __launch_bounds__(kThreads)
    scan_totals(int64_t count, const int32_t* totals, int32_t* starts, int32_t* next) {
  int32_t mine = 0;
  for (unsigned b = threadIdx.x; b < blockIdx.x; b += blockDim.x) mine += totals[b];
  const int32_t before = block_sum(mine);
  const int64_t first = blockIdx.x * kPerBlock;
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t i = first + k * kThreads + threadIdx.x;
    if (i >= count) continue;
    const int32_t start = starts[i] + before;
    starts[i] = start;
    next[i] = start;
  }
  if (blockIdx.x + 1 == gridDim.x && threadIdx.x == 0) {
    starts[count] = before + totals[blockIdx.x];
  }
}

__global__ void __launch_bounds__(kItemThreads)
    place(int64_t positions, const int32_t* targets, int32_t* next, int32_t* placed) {
  for_each_item(positions, [&](int64_t i) {
    const int32_t target = targets[i];
    if (target >= 0) placed[atomic_add(next + target, 1)] = static_cast<int32_t>(i);
  });
}

// A warp puts a list in order.
__global__ void __launch_bounds__(kThreads)
    order_lists(int64_t positions, int64_t count, const int32_t* targets, const int32_t* starts,
                const int32_t* placed, int32_t* sorted) {
  const int64_t warps = int64_t{gridDim.x} * (kThreads / kWarpSize);
  for (int64_t t = int64_t{blockIdx.x} * (kThreads / kWarpSize) + warp(); t < count; t += warps) {
    const int32_t begin = starts[t];
    const int32_t size = starts[t + 1] - begin;
    if (size <= kSortedLists) {
      for (int32_t i = lane(); i < size; i += kWarpSize) {
        const int32_t position = placed[begin + i];
        int32_t rank = 0;
        for (int32_t k = 0; k < size; ++k) rank += placed[begin + k] < position ? 1 : 0;
        sorted[begin + rank] = position;
      }
      continue;
    }
    int32_t found = begin;
    for (int64_t first = 0; first < positions; first += kWarpSize) {
      const int64_t i = first + lane();
      const int32_t hit = i < positions && targets[i] == t ? 1 : 0;
      const int32_t before = sum_below(hit);
      if (hit != 0) sorted[found + before] = static_cast<int32_t>(i);
      found += broadcast_lane(before + hit, kWarpSize - 1);
    }
  }
}

// NaN wins a maximum or minimum; integers wrap.
template <class C>
ORTRAIN_DEVICE C combine(Reduction reduction, C a, C b) {
  switch (reduction) {
    case Reduction::none:
      return b;
    case Reduction::add:
      if constexpr (std::is_integral_v<C> && !std::is_same_v<C, bool>) {
        return static_cast<C>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
      } else {
        return static_cast<C>(a + b);
      }
    case Reduction::mul:
      if constexpr (std::is_integral_v<C> && !std::is_same_v<C, bool>) {
        return static_cast<C>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
      } else {
        return static_cast<C>(a * b);
      }
    case Reduction::max:
      return b > a || b != b ? b : a;
    case Reduction::min:
      return b < a || b != b ? b : a;
  }
  return b;
}

// A block has rows x groups x columns of threads, all powers of two: the groups share a list.
struct Team {
  int columns, groups, rows;
  int64_t column_blocks;
};

template <class T, int kVector>
__global__ void __launch_bounds__(kThreads)
    join_lists(IndexLists lists, ListShape shape, Team team, Reduction reduction, const T* base,
               const T* updates, T* out) {
  using C = ComputeType<T>;
  __shared__ C shared[kThreads * kVector];
  const int column_thread = static_cast<int>(threadIdx.x) % team.columns;
  const int group = static_cast<int>(threadIdx.x) / team.columns % team.groups;
  const int row_thread = static_cast<int>(threadIdx.x) / (team.columns * team.groups);
  const int64_t row_block = blockIdx.x / team.column_blocks;
  const int64_t column_block = blockIdx.x - row_block * team.column_blocks;
  const int64_t row = row_block * team.rows + row_thread;
  const int64_t column = (column_block * team.columns + column_thread) * kVector;
  const int64_t outer = row / shape.targets;
  const bool inside = outer < shape.outer && column < shape.inner;
  int32_t begin = 0, end = 0;
  if (inside) {
    begin = lists.starts[row - outer * shape.targets];
    end = lists.starts[row - outer * shape.targets + 1];
    const T* from = updates + outer * shape.positions * shape.inner + column;
    C mine[kVector];
    for (int k = 0; k < kVector; ++k) mine[k] = C{0};
#pragma unroll 4
    for (int64_t i = int64_t{begin} + group; i < end; i += team.groups) {
      const Vector<T, kVector> values =
          load_vector<kVector>(from + lists.positions[i] * shape.inner);
      for (int k = 0; k < kVector; ++k) {
        const C value = static_cast<C>(values[k]);
        mine[k] = i - begin < team.groups ? value : combine(reduction, mine[k], value);
      }
    }
    for (int k = 0; k < kVector; ++k) shared[k * kThreads + threadIdx.x] = mine[k];
  }
  __syncthreads();
  if (!inside || group != 0) return;
  const int64_t at = row * shape.inner + column;
  if (begin == end && base == out) return;
  Vector<T, kVector> result = {};
  if (base != nullptr) result = load_vector<kVector>(base + at);
  if (begin != end) {
    for (int k = 0; k < kVector; ++k) {
      C total = shared[k * kThreads + threadIdx.x];
      for (int g = 1; g < team.groups && g < end - begin; ++g) {
        total = combine(reduction, total, shared[k * kThreads + threadIdx.x + g * team.columns]);
      }
      result[k] = static_cast<T>(
          base == nullptr ? total : combine(reduction, static_cast<C>(result[k]), total));
    }
  }
  store_vector<kVector>(out + at, result);
}

template <int kSize>
__global__ void __launch_bounds__(kItemThreads)
    write_last(TargetSink sink, int64_t count, int64_t inner, const void* from_address,
               void* to_address) {
  using Word = typename WordOf<kSize>::type;
  const Word* from = static_cast<const Word*>(from_address);
  Word* to = static_cast<Word*>(to_address);
  for_each_item(count, [&](int64_t i) {
    const int64_t position = i / inner;
    const int32_t target = sink.targets[position];
    if (target < 0 || sink.counts[target] != static_cast<int32_t>(position)) return;
    to[target * inner + (i - position * inner)] = from[i];
  });
}

template <class T, int kVector>
void launch_join(const IndexLists& lists, const ListShape& shape, Reduction reduction,
                 const void* base, const void* updates, void* out, void* stream) {
  const int64_t columns = shape.inner / kVector;
  Team team{1, 1, 1, 1};
  while (team.columns < kThreads && team.columns < columns) team.columns *= 2;
  // Lists are often long where there are more positions than targets, and some always may be.
  while (team.groups < 8 && team.columns * team.groups < kThreads) team.groups *= 2;
  team.rows = kThreads / (team.columns * team.groups);
  team.column_blocks = (columns + team.columns - 1) / team.columns;
  const int64_t row_blocks = (shape.outer * shape.targets + team.rows - 1) / team.rows;
  const int64_t blocks = row_blocks * team.column_blocks;
  check(!needs_wide(blocks), "the blocks of a launch are below 2^31");
  launch(join_lists<T, kVector>, {.blocks = block_count(blocks), .threads = kThreads}, stream,
         lists, shape, team, reduction, static_cast<const T*>(base), static_cast<const T*>(updates),
         static_cast<T*>(out));
}

// Everything of the lists, one array behind the other.
struct Arrays {
  int32_t *targets, *next, *starts, *placed, *sorted, *totals;
  Arrays(void* workspace, int64_t positions, int64_t targets_count) {
    targets = static_cast<int32_t*>(workspace);
    next = targets + positions;
    starts = next + targets_count;
    placed = starts + targets_count + 1;
    sorted = placed + positions;
    totals = sorted + positions;
  }
};

int64_t scan_blocks_of(int64_t targets) { return (targets + kPerBlock - 1) / kPerBlock; }

}  // namespace

std::optional<std::string> IndexListMaker::refusal(int64_t positions, int64_t targets) {
  if (needs_wide(positions) || needs_wide(targets)) return "2^31 indices or targets or more";
  return std::nullopt;
}

ByteCount IndexListMaker::workspace_bytes() const {
  return bytes_of<int32_t>(3, positions_) + bytes_of<int32_t>(2, targets_) +
         bytes_of<int32_t>(1 + scan_blocks_of(targets_));
}

TargetSink IndexListMaker::begin(void* workspace, void* stream) const {
  const Arrays arrays(workspace, positions_, targets_);
  fill_elements(arrays.next, targets_, sizeof(int32_t), 0, stream);
  return {arrays.targets, arrays.next};
}

IndexLists IndexListMaker::finish(void* workspace, void* stream) const {
  const Arrays arrays(workspace, positions_, targets_);
  const auto blocks = block_count(scan_blocks_of(targets_));
  const LaunchShape shape{.blocks = blocks, .threads = kThreads};
  launch(scan_blocks, shape, stream, targets_, arrays.next, arrays.starts, arrays.totals);
  launch(scan_totals, shape, stream, targets_, arrays.totals, arrays.starts, arrays.next);
  launch(place, items(positions_), stream, positions_, arrays.targets, arrays.next, arrays.placed);
  launch(order_lists, items(targets_ * kWarpSize, kThreads, 1 << 16), stream, positions_, targets_,
         arrays.targets, arrays.starts, arrays.placed, arrays.sorted);
  return {arrays.starts, arrays.sorted};
}

TargetSink LastPositions::begin(void* workspace, void* stream) const {
  auto* const targets = static_cast<int32_t*>(workspace);
  fill_elements(targets + positions_, targets_, sizeof(int32_t), 0xffffffffu, stream);
  return {targets, targets + positions_, true};
}

void apply_lists(DType dtype, const IndexLists& lists, const ListShape& shape, Reduction reduction,
                 const void* base, const void* updates, void* out, void* stream) {
  if (shape.outer * shape.targets * shape.inner == 0) return;
  dispatch_all(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_integral_v<T>) {
      constexpr int kVector = 16 / static_cast<int>(sizeof(T));
      int aligned = word_of_address(updates, word_of_address(out));
      if (base != nullptr) aligned = word_of_address(base, aligned);
      if (shape.inner % kVector == 0 && aligned == 16) {
        launch_join<T, kVector>(lists, shape, reduction, base, updates, out, stream);
        return;
      }
    }
    launch_join<T, 1>(lists, shape, reduction, base, updates, out, stream);
  });
}

void apply_last(size_t element_size, const TargetSink& sink, const ListShape& shape,
                const void* updates, void* out, void* stream) {
  const int64_t row = shape.inner * static_cast<int64_t>(element_size);
  const int word = word_of_address(updates, word_of_address(out, common_word({row})));
  const int64_t inner = row / word;
  const int64_t count = shape.positions * inner;
  dispatch_word(word, [&](auto bytes) {
    launch(write_last<decltype(bytes)::value>, items(count), stream, sink, count, inner, updates,
           out);
  });
}

}  // namespace ortrain::gpu
