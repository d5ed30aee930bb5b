// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/merge.h"
#include "ortrain/gpu/reduce.h"

// Kernels that work on the rows of a matrix: who works on a row (a warp or a block), how wide its
// reads are, and whether the row stays in registers between one pass over it and the next.
namespace ortrain::gpu {

#if defined(__CUDACC__) || defined(__HIPCC__)
#define ORTRAIN_UNROLL _Pragma("unroll")
#else
#define ORTRAIN_UNROLL
#endif

// Elements of T in the 16 bytes that a thread moves at a time.
template <class T>
inline constexpr int kPackWidth = 16 / static_cast<int>(sizeof(T));

template <class T, int kWidth>
struct RowPack {
  T values[kWidth];
  ORTRAIN_DEVICE T& operator[](int i) { return values[i]; }
  ORTRAIN_DEVICE const T& operator[](int i) const { return values[i]; }
};

struct alignas(16) PackWords {
  uint32_t words[4];
};

// One element, or 16 bytes at a 16-byte aligned place.
template <int kWidth, class T>
ORTRAIN_DEVICE RowPack<T, kWidth> load_pack(const T* from) {
  using Pack = RowPack<T, kWidth>;
  static_assert(kWidth == 1 || sizeof(Pack) == 16);
  if constexpr (kWidth == 1) {
    return Pack{{*from}};
  } else {
#if defined(__CUDACC__) || defined(__HIPCC__)
    return std::bit_cast<Pack>(*reinterpret_cast<const PackWords*>(from));
#else
    PackWords words;
    __builtin_memcpy(&words, from, sizeof(words));
    return std::bit_cast<Pack>(words);
#endif
  }
}

template <int kWidth, class T>
ORTRAIN_DEVICE void store_pack(T* to, const RowPack<T, kWidth>& pack) {
  if constexpr (kWidth == 1) {
    *to = pack[0];
  } else {
    const auto words = std::bit_cast<PackWords>(pack);
#if defined(__CUDACC__) || defined(__HIPCC__)
    *reinterpret_cast<PackWords*>(to) = words;
#else
    __builtin_memcpy(static_cast<void*>(to), &words, sizeof(words));
#endif
  }
}

// The pack at any address of T's, whose elements before `end` count: nothing behind it is read. By
// the aligned words that it lies in.
template <int kWidth, class T>
ORTRAIN_DEVICE RowPack<T, kWidth> load_pack_anywhere(const T* from, const T* end) {
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16);
  const T* const base = from - shift / static_cast<int>(sizeof(T));
  if (end - base < 2 * kWidth) {
    RowPack<T, kWidth> pack{};
    ORTRAIN_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      if (from + i < end) pack[i] = from[i];
    }
    return pack;
  }
  const auto low = std::bit_cast<PackWords>(load_pack<kWidth>(base));
  if (shift == 0) return std::bit_cast<RowPack<T, kWidth>>(low);
  const auto high = std::bit_cast<PackWords>(load_pack<kWidth>(base + kWidth));
  uint32_t words[8];
  ORTRAIN_UNROLL
  for (int i = 0; i < 4; ++i) {
    words[i] = low.words[i];
    words[4 + i] = high.words[i];
  }
  // Shifted by constant distances, so that they stay in registers.
  ORTRAIN_UNROLL
  for (int i = 0; i < 6; ++i) words[i] = (shift & 8) != 0 ? words[i + 2] : words[i];
  ORTRAIN_UNROLL
  for (int i = 0; i < 5; ++i) words[i] = (shift & 4) != 0 ? words[i + 1] : words[i];
  PackWords shifted;
  ORTRAIN_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint64_t both = uint64_t{words[i + 1]} << 32 | words[i];
    shifted.words[i] = static_cast<uint32_t>(both >> (shift % 4 * 8));
  }
  return std::bit_cast<RowPack<T, kWidth>>(shifted);
}

// Whether all of them are 16-byte aligned; null is.
template <class... Pointers>
bool pack_aligned(const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) | ...) & 15u) == 0;
}

// A warp per row.
struct WarpTeam {
  static constexpr int kThreads = 4 * kWarpSize;
  static constexpr bool kIsWarp = true;
  static ORTRAIN_DEVICE int rank() { return lane(); }
  static ORTRAIN_DEVICE int size() { return kWarpSize; }
  static ORTRAIN_DEVICE int64_t index() {
    return int64_t{blockIdx.x} * (blockDim.x / kWarpSize) + warp();
  }
  static ORTRAIN_DEVICE int64_t count() { return int64_t{gridDim.x} * (blockDim.x / kWarpSize); }
  template <class T, class Op>
  static ORTRAIN_DEVICE T reduce(T value, T, Op op) {
    return warp_reduce(value, op);
  }
  template <class S, class Op>
  static ORTRAIN_DEVICE S merge(const S& state, const S&, const Op& op) {
    return warp_merge(state, op);
  }
};

// A block of at most kMostThreads per row.
template <int kMostThreads>
struct BlockTeam {
  static constexpr int kThreads = kMostThreads;
  static constexpr bool kIsWarp = false;
  static ORTRAIN_DEVICE int rank() { return static_cast<int>(threadIdx.x); }
  static ORTRAIN_DEVICE int size() { return static_cast<int>(blockDim.x); }
  static ORTRAIN_DEVICE int64_t index() { return blockIdx.x; }
  static ORTRAIN_DEVICE int64_t count() { return gridDim.x; }
  template <class T, class Op>
  static ORTRAIN_DEVICE T reduce(T value, T none, Op op) {
    return block_reduce(value, none, op);
  }
  template <class S, class Op>
  static ORTRAIN_DEVICE S merge(const S& state, const S& none, const Op& op) {
    return block_merge(state, none, op);
  }
};

// kWidth elements at a time; kPacks times that many per thread cover the row and stay in
// registers; kPacks 0: the row is of any length and is read again in each pass. Ragged: rows begin
// anywhere, and their last pack is not full.
template <class TeamOf, int kWidthOf, int kPacksOf, bool kRaggedOf = false>
struct RowForm {
  using Team = TeamOf;
  static constexpr int kWidth = kWidthOf;
  static constexpr int kPacks = kPacksOf;
  static constexpr bool kKept = kPacks > 0;
  static constexpr bool kRagged = kRaggedOf;
  static_assert(!kRagged || !kKept);

  // Whether element i of the pack at `column` is one of the row.
  static ORTRAIN_DEVICE bool has(int64_t column, int i, int64_t n) {
    return !kRagged || column + i < n;
  }
  // body(slot, first column) for each of this thread's packs in a row of n columns.
  template <class Body>
  static ORTRAIN_DEVICE void for_each_pack(int64_t n, const Body& body) {
    if constexpr (kKept) {
      ORTRAIN_UNROLL
      for (int k = 0; k < kPacks; ++k) {
        const int column = (k * Team::size() + Team::rank()) * kWidth;
        if (column < n) body(k, static_cast<int64_t>(column));
      }
    } else {
      const int64_t step = int64_t{Team::size()} * kWidth;
      for (int64_t column = int64_t{Team::rank()} * kWidth; column < n; column += step) {
        body(0, column);
      }
    }
  }
};

// What one thread reads of a row: `first` in the first pass over it, `again` in later ones.
template <class T, class Form>
class RowInput {
 public:
  using Pack = RowPack<T, Form::kWidth>;
  // `end` of the tensor: needed for ragged rows, whose last pack has anything behind the row.
  explicit ORTRAIN_DEVICE RowInput(const T* row, const T* end = nullptr) : row_(row), end_(end) {}
  ORTRAIN_DEVICE Pack first(int slot, int64_t column) {
    const Pack pack = load(column);
    if constexpr (Form::kKept) kept_[slot] = pack;
    return pack;
  }
  ORTRAIN_DEVICE Pack again(int slot, int64_t column) const {
    if constexpr (Form::kKept) return kept_[slot];
    return load(column);
  }

 private:
  ORTRAIN_DEVICE Pack load(int64_t column) const {
    if constexpr (Form::kRagged) return load_pack_anywhere<Form::kWidth>(row_ + column, end_);
    return load_pack<Form::kWidth>(row_ + column);
  }

  const T *row_, *end_;
  Pack kept_[Form::kKept ? Form::kPacks : 1];
};

// Calls body(RowForm<...>()) with the form for rows of `columns` elements of T. `aligned`: whether
// every tensor that is read or written by rows starts at a multiple of 16 bytes. kMostThreads:
// of a block; fewer leave each of them more registers. kMostPacks: of a lane where a warp has a row
// of its own; 8 for kernels that keep little else, since a warp waits for no barrier.
template <class T, int kMostThreads = 1024, int kMostPacks = 4, class Body>
void with_row_form(int64_t columns, bool aligned, const Body& body) {
  constexpr int kWidth = kPackWidth<T>;
  using Block = BlockTeam<kMostThreads>;
  if constexpr (sizeof(T) <= 4) {
    if (aligned && columns % kWidth == 0) {
      constexpr int64_t kPerWarp = int64_t{kWarpSize} * kWidth;
      if (columns <= kPerWarp) return body(RowForm<WarpTeam, kWidth, 1>());
      if (columns <= 4 * kPerWarp) return body(RowForm<WarpTeam, kWidth, 4>());
      if constexpr (kMostPacks > 4) {
        if (columns <= kMostPacks * kPerWarp) return body(RowForm<WarpTeam, kWidth, kMostPacks>());
      }
      if (columns <= int64_t{2} * kMostThreads * kWidth) return body(RowForm<Block, kWidth, 2>());
      return body(RowForm<Block, kWidth, 0>());
    }
  }
  if (columns <= 16 * kWarpSize) return body(RowForm<WarpTeam, 1, 0>());
  return body(RowForm<Block, 1, 0>());
}

// The same for kernels that take ragged rows, where these are long and `starts_aligned`: the tensor
// does.
template <class T, class Body>
void with_ragged_row_form(int64_t columns, bool starts_aligned, const Body& body) {
  constexpr int kWidth = kPackWidth<T>;
  if constexpr (sizeof(T) <= 4) {
    if (starts_aligned && columns % kWidth != 0 && columns >= 64 * kWidth) {
      return body(RowForm<BlockTeam<1024>, kWidth, 0, true>());
    }
  }
  with_row_form<T>(columns, starts_aligned, body);
}

// At most `most_teams` teams, each of which takes every so many rows.
template <class Form>
LaunchShape row_shape(int64_t rows, int64_t columns, int64_t most_teams = int64_t{1} << 20) {
  const int64_t teams = std::min(rows, most_teams);
  if (Form::Team::kIsWarp) {
    constexpr int64_t kWarps = Form::Team::kThreads / kWarpSize;
    return {.blocks = block_count((teams + kWarps - 1) / kWarps),
            .threads = static_cast<unsigned>(Form::Team::kThreads)};
  }
  const int64_t per_thread = int64_t{Form::kWidth} * (Form::kKept ? Form::kPacks : 4);
  return {.blocks = block_count(teams),
          .threads = row_threads(columns, per_thread, Form::Team::kThreads)};
}

// Teams of that launch.
template <class Form>
int64_t row_teams(int64_t rows, int64_t columns, int64_t most_teams) {
  const LaunchShape shape = row_shape<Form>(rows, columns, most_teams);
  return int64_t{shape.blocks} * (Form::Team::kIsWarp ? shape.threads / kWarpSize : 1);
}

}  // namespace ortrain::gpu
