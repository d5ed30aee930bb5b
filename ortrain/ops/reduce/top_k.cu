// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <bit>

#include "ortrain/base/axis_split.h"
#include "ortrain/gpu/row_forms.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

// A value as an unsigned number whose order is that of the result: the first comes lowest. NaN
// counts as the largest value; all NaN are equal, and both zeros.
template <class T>
using Key = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
ORTRAIN_DEVICE Key<T> key_of(T value, bool largest) {
  using K = Key<T>;
  constexpr K kTop = K{1} << (8 * sizeof(K) - 1);
  K key;
  if constexpr (std::is_integral_v<T>) {
    key = static_cast<K>(value);
    if constexpr (std::is_signed_v<T>) key ^= kTop;
  } else {
    using C = ComputeType<T>;
    const C number = static_cast<C>(value) + C{0};  // -0 becomes 0
    const K bits = std::bit_cast<K>(number);
    key = number != number ? ~K{0} : (bits & kTop) != 0 ? ~bits : bits | kTop;
  }
  return largest ? ~key : key;
}

struct TopK {
  int64_t outer, size, inner, k;
  bool largest;

  ORTRAIN_HOST_DEVICE int64_t lines() const { return outer * inner; }
  // Of element 0 of a line; the next ones lie `inner` further.
  ORTRAIN_DEVICE int64_t start(int64_t line, int64_t extent) const {
    return line / inner * extent * inner + line % inner;
  }
};

template <class K>
struct Entry {
  K key;
  uint32_t position;
  uint32_t unused;  // whole words, whatever K is

  ORTRAIN_DEVICE bool before(const Entry& other) const {
    return key != other.key ? key < other.key : position < other.position;
  }
};

struct EarlierEntry {
  template <class E>
  ORTRAIN_DEVICE E operator()(const E& a, const E& b) const {
    return b.before(a) ? b : a;
  }
};

template <class T>
ORTRAIN_DEVICE void write_entry(const TopK& a, int64_t line, int64_t at, int64_t position,
                                const T* x, T* values, int64_t* indices) {
  const int64_t to = a.start(line, a.k) + at * a.inner;
  if (values != nullptr) values[to] = x[a.start(line, a.size) + position * a.inner];
  if (indices != nullptr) indices[to] = position;
}

// --- few of short lines: a warp per line finds the next one after the last, k times

constexpr int64_t kMostRounds = 32;
constexpr int64_t kLongestOfRounds = 4096;

template <class T>
__global__ void top_k_rounds(TopK a, const T* x, T* values, int64_t* indices) {
  using E = Entry<Key<T>>;
  const int64_t teams = WarpTeam::count();
  for (int64_t line = WarpTeam::index(); line < a.lines(); line += teams) {
    const T* from = x + a.start(line, a.size);
    E last{0, 0, 0};
    for (int64_t round = 0; round < a.k; ++round) {
      E best{~Key<T>{0}, ~uint32_t{0}, 0};
      for (int64_t i = lane(); i < a.size; i += kWarpSize) {
        const E next{key_of(from[i * a.inner], a.largest), static_cast<uint32_t>(i), 0};
        if ((round == 0 || last.before(next)) && next.before(best)) best = next;
      }
      last = warp_merge(best, EarlierEntry());
      if (lane() == 0) write_entry(a, line, round, last.position, x, values, indices);
    }
  }
}

// --- else a block per line: the key of the last one by its digits, then what is not behind it,
// in order of position, then sorted

constexpr int kBlockThreads = 256;
constexpr int kDigit = 8;

// Numbers the threads for which `takes` holds, in their order; `all`: how many there are.
ORTRAIN_DEVICE int rank_in_block(bool takes, int& all) {
  __shared__ int sums[kBlockThreads / kWarpSize];
  int upto = takes ? 1 : 0;
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int below = exchange_up(upto, distance);
    if (lane() >= distance) upto += below;
  }
  if (lane() == kWarpSize - 1) sums[warp()] = upto;
  __syncthreads();
  int before = upto - (takes ? 1 : 0);
  all = 0;
  for (int w = 0; w < kBlockThreads / kWarpSize; ++w) {
    if (w == warp()) before += all;
    all += sums[w];
  }
  __syncthreads();
  return before;
}

// The key of rank k - 1, and how many of those with that key are among the first k.
template <class T>
ORTRAIN_DEVICE Key<T> last_key(const TopK& a, const T* from, int64_t& equal) {
  using K = Key<T>;
  __shared__ uint32_t counts[1 << kDigit];
  __shared__ K chosen;
  __shared__ int64_t wanted;
  K prefix = 0, mask = 0;
  int64_t left = a.k;
  for (int shift = 8 * static_cast<int>(sizeof(K)) - kDigit; shift >= 0; shift -= kDigit) {
    for (int d = static_cast<int>(threadIdx.x); d < (1 << kDigit); d += kBlockThreads) {
      counts[d] = 0;
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < a.size; i += kBlockThreads) {
      const K key = key_of(from[i * a.inner], a.largest);
      // Counting in any order gives the same numbers.
      if ((key & mask) == prefix) {
        atomic_add(&counts[(key >> shift) & ((1 << kDigit) - 1)], uint32_t{1});
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      K digit = 0;
      while (left > static_cast<int64_t>(counts[digit])) left -= counts[digit++];
      chosen = digit;
      wanted = left;
    }
    __syncthreads();
    prefix |= chosen << shift;
    mask |= K{(1 << kDigit) - 1} << shift;
    left = wanted;
    __syncthreads();
  }
  equal = left;
  return prefix;
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    top_k_select(TopK a, int64_t room, const T* x, Entry<Key<T>>* buffer, T* values,
                 int64_t* indices) {
  using E = Entry<Key<T>>;
  E* const entries = buffer + blockIdx.x * room;
  for (int64_t line = blockIdx.x; line < a.lines(); line += gridDim.x) {
    const T* from = x + a.start(line, a.size);
    int64_t equal_left = 0;
    const Key<T> last = last_key(a, from, equal_left);
    int64_t found = 0;
    for (int64_t begin = 0; begin < a.size; begin += kBlockThreads) {
      const int64_t i = begin + threadIdx.x;
      const Key<T> key = i < a.size ? key_of(from[i * a.inner], a.largest) : ~Key<T>{0};
      int equal_here = 0, here = 0;
      const int equal_rank = rank_in_block(i < a.size && key == last, equal_here);
      const bool takes = i < a.size && (key < last || (key == last && equal_rank < equal_left));
      const int rank = rank_in_block(takes, here);
      if (takes) entries[found + rank] = {key, static_cast<uint32_t>(i), 0};
      found += here;
      equal_left -= equal_here < equal_left ? equal_here : equal_left;
    }
    for (int64_t i = a.k + threadIdx.x; i < room; i += kBlockThreads) {
      entries[i] = {~Key<T>{0}, ~uint32_t{0}, 0};
    }
    __syncthreads();
    // Batcher's bitonic sort; room is a power of two.
    for (int64_t size = 2; size <= room; size *= 2) {
      for (int64_t step = size / 2; step > 0; step /= 2) {
        for (int64_t pair = threadIdx.x; pair < room / 2; pair += kBlockThreads) {
          const int64_t low = pair / step * step * 2 + pair % step, high = low + step;
          const E first = entries[low], second = entries[high];
          if (((low & size) == 0) == second.before(first)) {
            entries[low] = second;
            entries[high] = first;
          }
        }
        __syncthreads();
      }
    }
    for (int64_t i = threadIdx.x; i < a.k; i += kBlockThreads) {
      write_entry(a, line, i, entries[i].position, x, values, indices);
    }
    __syncthreads();
  }
}

constexpr int64_t kMostBlocks = 512;

std::optional<std::string> why_not(const NodeSpec& spec) {
  const AxisSplit split(spec.input(0).dims, spec.attrs().int_("axis"));
  if (split.size <= int64_t{1} << 31) return std::nullopt;
  return "lines of more than 2^31 elements";
}

KernelFn make_top_k(NodeSpec& spec) {
  const AxisSplit split(spec.input(0).dims, spec.attrs().int_("axis"));
  const AxisSplit results(spec.output(0).dims, spec.attrs().int_("axis"));
  const TopK a{split.outer, split.size, split.inner, results.size,
               spec.attrs().int_("largest") != 0};
  const bool has_values = spec.has_output(0), has_indices = spec.has_output(1);
  return dispatch_all(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, bool>) {
      throw DTypeError("no kernel for bool");
    } else {
      if (a.k == 0 || a.lines() == 0) return [](const KernelArgs&) {};
      const bool rounds = a.k <= kMostRounds && a.size <= kLongestOfRounds;
      const int64_t blocks = std::min(a.lines(), kMostBlocks);
      const auto room = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(a.k)));
      if (!rounds) {
        spec.request_workspace(bytes_of<Entry<Key<T>>>(blocks, room));
      }
      return [=](const KernelArgs& args) {
        const T* x = args.input<T>(0);
        T* values = has_values ? args.output<T>(0) : nullptr;
        int64_t* indices = has_indices ? args.output<int64_t>(1) : nullptr;
        if (rounds) {
          launch(top_k_rounds<T>, row_shape<RowForm<WarpTeam, 1, 0>>(a.lines(), a.size),
                 args.stream, a, x, values, indices);
        } else {
          launch(top_k_select<T>, {.blocks = block_count(blocks), .threads = kBlockThreads},
                 args.stream, a, room, x, static_cast<Entry<Key<T>>*>(args.workspace), values,
                 indices);
        }
      };
    }
  });
}

}  // namespace

// NonZero has no kernel: the extent of its result depends on data, and a plan needs every shape.
void register_top_k(KernelRegistry& registry) {
  registry.add("TopK", {{.name = "select", .why_not = why_not, .make = make_top_k}});
}

}  // namespace ortrain::gpu
