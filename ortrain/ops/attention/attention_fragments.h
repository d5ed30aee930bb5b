// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/gpu/async_copy.h"
#include "ortrain/gpu/matrix_fragment.h"
#include "ortrain/gpu/reduce.h"
#include "ortrain/ops/attention/attention_device.h"

// Tiles of 16-bit queries and keys for matrix units. A block has four warps, each of which owns
// 16 or 32 rows of the outer tile; the inner tiles go by. Scores stay in registers. kD: the width
// of rows in shared memory, at least that of the heads.
namespace ortrain::gpu {

inline constexpr int kFragmentWarps = 4;
inline constexpr int kFragmentThreads = kFragmentWarps * kWarpSize;
inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

template <class T>
struct alignas(16) AttentionEight {
  T v[8];
};

// Distance of rows in shared memory: an odd multiple of 16 bytes, for the banks.
template <int kD>
inline constexpr int kFragmentStride = kD + 8;

// One operand's rows of a tile in global memory; `packs`: rows are 16-byte aligned.
template <class T>
struct FragmentRows {
  const T* data;
  int64_t stride;
  int64_t left;  // rows until the end, may be more than the tile has
  int width;
  bool packs;
};

// Begins copies of kRows rows, of as many columns as a product over the width reads; zeros outside.
template <int kRows, int kD, class T>
ORTRAIN_DEVICE void load_rows(T* tile, const FragmentRows<T>& rows) {
  const int columns = (rows.width + 15) / 16 * 16;
  for (int unit = threadIdx.x; unit < kRows * (kD / 8); unit += kFragmentThreads) {
    const int row = unit / (kD / 8);
    const int column = unit % (kD / 8) * 8;
    if (column >= columns) continue;
    T* const to = tile + row * kFragmentStride<kD> + column;
    const T* const from = rows.data + row * rows.stride + column;
    if (rows.packs && row < rows.left && column < rows.width) {
      copy_16_bytes(to, from);
      continue;
    }
    AttentionEight<T> pack;
    ORTRAIN_UNROLL
    for (int e = 0; e < 8; ++e) {
      pack.v[e] = row < rows.left && column + e < rows.width ? from[e] : T(0.0f);
    }
    *reinterpret_cast<AttentionEight<T>*>(to) = pack;
  }
}

// sums[m][n] = rows 16 m to 16 m + 15 of `a` times rows 16 n to 16 n + 15 of `b`, over `width`.
template <int kM, int kN, int kD, class T>
ORTRAIN_DEVICE void multiply_rows(Accumulator (&sums)[kM][kN], const T* a, const T* b, int width) {
  constexpr int kStride = kFragmentStride<kD>;
  ORTRAIN_UNROLL
  for (int m = 0; m < kM; ++m) {
    ORTRAIN_UNROLL
    for (int n = 0; n < kN; ++n) sums[m][n].fill(0);
  }
  ORTRAIN_UNROLL
  for (int q = 0; q < kD; q += 16) {
    if (q >= width) continue;
    FragmentA<T> left[kM];
    ORTRAIN_UNROLL
    for (int m = 0; m < kM; ++m) left[m].load(a + m * 16 * kStride + q, kStride);
    ORTRAIN_UNROLL
    for (int n = 0; n < kN; ++n) {
      FragmentB<T> right;
      right.load_transposed(b + n * 16 * kStride + q, kStride);
      ORTRAIN_UNROLL
      for (int m = 0; m < kM; ++m) multiply_add(sums[m][n], left[m], right);
    }
  }
}

// sums[m][c] += weights[m][:] times columns 16 c to 16 c + 15 of the rows of `b`, below `width`.
template <int kM, int kN, int kD, class T>
ORTRAIN_DEVICE void add_weighted_rows(Accumulator (&sums)[kM][kD / 16],
                                      const Accumulator (&weights)[kM][kN], const T* b, int width) {
  constexpr int kStride = kFragmentStride<kD>;
  ORTRAIN_UNROLL
  for (int n = 0; n < kN; ++n) {
    FragmentA<T> left[kM];
    ORTRAIN_UNROLL
    for (int m = 0; m < kM; ++m) left[m].from(weights[m][n]);
    ORTRAIN_UNROLL
    for (int c = 0; c < kD / 16; ++c) {
      if (c * 16 >= width) continue;
      FragmentB<T> right;
      right.load(b + n * 16 * kStride + c * 16, kStride);
      ORTRAIN_UNROLL
      for (int m = 0; m < kM; ++m) multiply_add(sums[m][c], left[m], right);
    }
  }
}

// Writes a warp's rows of results, each element times factor(m, row slot), by way of `staging` in
// shared memory, which only this warp uses.
template <int kM, int kD, class T, class Factor>
ORTRAIN_DEVICE void store_rows(T* staging, const Accumulator (&sums)[kM][kD / 16], T* to,
                               int64_t stride, int64_t left, int width, bool packs,
                               const Factor& factor) {
  constexpr int kStride = kFragmentStride<kD>;
  ORTRAIN_UNROLL
  for (int m = 0; m < kM; ++m) {
    ORTRAIN_UNROLL
    for (int c = 0; c < kD / 16; ++c) {
      ORTRAIN_UNROLL
      for (int e = 0; e < Accumulator::kElements; ++e) {
        staging[(m * 16 + Accumulator::row_of(e)) * kStride + c * 16 + Accumulator::column_of(e)] =
            static_cast<T>(sums[m][c][e] * factor(m, Accumulator::row_slot(e)));
      }
    }
  }
  warp_barrier();
  for (int unit = lane(); unit < kM * 16 * (kD / 8); unit += kWarpSize) {
    const int row = unit / (kD / 8);
    const int column = unit % (kD / 8) * 8;
    if (row >= left || column >= width) continue;
    const auto pack = *reinterpret_cast<const AttentionEight<T>*>(staging + row * kStride + column);
    T* const target = to + row * stride + column;
    if (packs) {
      *reinterpret_cast<AttentionEight<T>*>(target) = pack;
      continue;
    }
    ORTRAIN_UNROLL
    for (int e = 0; e < 8; ++e) {
      if (column + e < width) target[e] = pack.v[e];
    }
  }
}

// What dropout keeps of 16 queries times 16 keys. Each lane draws for a part of one query's keys,
// and asks the others for what its own elements need.
class FragmentDropout {
 public:
  ORTRAIN_DEVICE FragmentDropout(const AttentionDropout& dropout, const AttentionElements& elements,
                                 int64_t query, int64_t key)
      : bits_(dropout.kept(elements.draw(query + lane() / kShare, key + lane() % kShare * kKeys),
                           kKeys)) {}

  // Element e of an accumulator whose rows are queries, or keys. All lanes take part.
  template <bool kKeysAreRows>
  ORTRAIN_DEVICE bool keeps(int e) const {
    const int row = Accumulator::row_of(e), column = Accumulator::column_of(e);
    const int query = kKeysAreRows ? column : row;
    const int key = kKeysAreRows ? row : column;
    return (broadcast_lane(bits_, query * kShare + key / kKeys) >> (key % kKeys)) & 1u;
  }

 private:
  static constexpr int kShare = kWarpSize / 16;  // lanes per query
  static constexpr int kKeys = 16 / kShare;
  unsigned bits_;
};

// What is added to the scores, of base 2, of queries and keys counted from the beginning of tiles.
template <class T>
class FragmentMask {
 public:
  ORTRAIN_DEVICE FragmentMask(const AttentionElements& elements, int64_t query, int64_t key,
                              int most_queries, int most_keys)
      : mask_(elements.p.mask),
        queries_(AttentionElements::up_to(elements.span.queries - query, most_queries)),
        keys_(AttentionElements::up_to(elements.span.keys - key, most_keys)),
        // Key n is seen by query m where n - m < diagonal_.
        diagonal_(elements.p.causal ? between(query + 1 - key, -most_queries, most_keys)
                                    : most_keys),
        at_(mask_.at(elements.b, elements.h, query, key)) {
    hides_ = mask_.kind != AttentionMask::Kind::none || keys_ < most_keys || diagonal_ < most_keys;
  }

  // Whether any of the tile's elements may be changed. Queries behind the end are not looked at.
  ORTRAIN_DEVICE bool hides() const { return hides_; }
  ORTRAIN_DEVICE float apply(float score, int query, int key) const {
    constexpr float kNever = -std::numeric_limits<float>::infinity();
    if (query >= queries_ || key >= keys_ || key - query >= diagonal_) return kNever;
    if (mask_.kind == AttentionMask::Kind::none) return score;
    const int64_t at = at_ + query * mask_.row + key * mask_.col;
    if (mask_.kind == AttentionMask::Kind::boolean) {
      return static_cast<const bool*>(mask_.data)[at] ? score : kNever;
    }
    return score + static_cast<float>(static_cast<const T*>(mask_.data)[at]) * kLog2E;
  }

 private:
  ORTRAIN_DEVICE static int between(int64_t value, int least, int most) {
    return value < least ? least : value > most ? most : static_cast<int>(value);
  }

  const AttentionMask& mask_;
  int queries_, keys_, diagonal_;
  int64_t at_;
  bool hides_;
};

// Tiles of keys that a boolean mask hides from all queries are skipped, where the mask is the same
// for all queries. All threads of the block take part.
template <int kKeys>
ORTRAIN_DEVICE int64_t next_visible_tile(const AttentionElements& elements, int64_t key,
                                         int64_t end) {
  const AttentionMask& mask = elements.p.mask;
  if (mask.kind != AttentionMask::Kind::boolean || mask.row != 0) return key;
  static_assert(kKeys <= kFragmentThreads);
  for (; key < end; key += kKeys) {
    const int64_t j = key + threadIdx.x;
    const bool sees = static_cast<int>(threadIdx.x) < kKeys && j < elements.span.keys &&
                      static_cast<const bool*>(mask.data)[mask.at(elements.b, elements.h, 0, j)];
    if (__syncthreads_or(sees)) break;
  }
  return key;
}

}  // namespace ortrain::gpu
