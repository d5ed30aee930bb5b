// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/gpu/async_copy.h"
#include "ortrain/gpu/matrix_fragment.h"
#include "ortrain/gpu/reduce.h"
#include "ortrain/ops/attention/attention_draws.h"

// Tiles of 16-bit queries and keys for matrix units. A block has four warps, each of which owns
// 16 kM rows of the outer tile; the inner tiles go by. Scores stay in registers. kD: the width
// of rows in shared memory, at least that of the heads.
namespace ortrain::gpu {

inline constexpr int kFragmentWarps = 4;
inline constexpr int kFragmentThreads = kFragmentWarps * kWarpSize;
inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// What kernels are made for. Plain problems have fewer branches and registers: heads as wide as
// rows in shared memory, aligned rows, one sequence, no mask, or one of keys alone (padding).
enum class AttentionForm { general, plain, masked_keys };
inline constexpr bool is_plain(AttentionForm form) { return form != AttentionForm::general; }

template <int kD>
AttentionForm form_of(const AttentionProblem& p) {
  const bool plain = p.head_dim == kD && p.value_dim == kD && p.q_packs && p.k_packs && p.v_packs &&
                     p.out_packs && static_cast<float>(p.scale) * kLog2E > 0 && p.sequences < 0;
  if (plain && p.mask.kind == AttentionMask::Kind::none) return AttentionForm::plain;
  const bool of_keys =
      p.mask.kind == AttentionMask::Kind::boolean && p.mask.head == 0 && p.mask.row == 0;
  return plain && of_keys ? AttentionForm::masked_keys : AttentionForm::general;
}

template <AttentionForm kForm>
ORTRAIN_DEVICE AttentionSpan fragment_span(const AttentionProblem& p, int64_t tile, int size,
                                           int64_t& start) {
  if (!is_plain(kForm)) return span_of_tile(p, tile, size, start);
  start = tile * size;
  return {0, p.queries, p.keys};
}

template <class T>
struct alignas(16) AttentionEight {
  T v[8];
};

// Distance of rows in shared memory: an odd multiple of 16 bytes, for the banks.
template <int kD>
inline constexpr int kFragmentStride = kD + 8;

// The rows of one operand of a head in global memory, of which a block copies tiles. Each thread
// copies 16 bytes of every kStep-th row, in the same columns.
template <class T, int kD, AttentionForm kForm>
class FragmentRows {
 public:
  // `packs`: rows are 16-byte aligned.
  ORTRAIN_DEVICE FragmentRows(const T* data, int64_t stride, int rows, int width, bool packs)
      : data_(data + own_row() * stride + own_column()),
        stride_(stride),
        rows_(rows),
        width_(is_plain(kForm) ? kD : width),
        packs_(is_plain(kForm) || packs) {}

  // Begins copies of kRows rows, of as many columns as a product over the width reads; zeros
  // outside.
  template <int kRows>
  ORTRAIN_DEVICE void load(T* tile, int first) const {
    static_assert(kFragmentThreads % kUnits == 0 && kRows % kStep == 0);
    if (own_column() >= (width_ + 15) / 16 * 16) return;
    const int there = rows_ - first - own_row();
    T* const to = tile + own_row() * kFragmentStride<kD> + own_column();
    const T* const from = data_ + first * stride_;
    if (packs_) {
      const int whole = own_column() < width_ ? there : 0;
      ORTRAIN_UNROLL
      for (int row = 0; row < kRows; row += kStep) {
        copy_16_bytes(to + row * kFragmentStride<kD>, from + row * stride_, row < whole);
      }
      return;
    }
    ORTRAIN_ROLL
    for (int row = 0; row < kRows; row += kStep) {
      ORTRAIN_ROLL
      for (int e = 0; e < 8; ++e) {
        const bool is_there = row < there && own_column() + e < width_;
        to[row * kFragmentStride<kD> + e] = is_there ? from[row * stride_ + e] : T(0.0f);
      }
    }
  }

 private:
  static constexpr int kUnits = kD / 8, kStep = kFragmentThreads / kUnits;
  ORTRAIN_DEVICE static int own_row() { return static_cast<int>(threadIdx.x) / kUnits; }
  ORTRAIN_DEVICE static int own_column() { return static_cast<int>(threadIdx.x) % kUnits * 8; }

  const T* data_;
  int64_t stride_;
  int rows_, width_;
  bool packs_;
};

// sums[m][n] = rows 16 m to 16 m + 15 of `a` times rows 16 n to 16 n + 15 of `b`, over `width`.
template <int kM, int kN, int kD, class T>
ORTRAIN_DEVICE void multiply_rows(Accumulator (&sums)[kM][kN], const T* a, const T* b, int width) {
  constexpr int kStride = kFragmentStride<kD>;
  ORTRAIN_UNROLL
  for (int m = 0; m < kM; ++m) {
    ORTRAIN_UNROLL
    for (int n = 0; n < kN; ++n) sums[m][n].fill(0);
  }
  const auto add_columns = [&](int q) {
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
  };
  if (width > kD - 16) {  // loads may overtake products
    ORTRAIN_UNROLL
    for (int q = 0; q < kD; q += 16) add_columns(q);
  } else {
    ORTRAIN_ROLL
    for (int q = 0; q < width; q += 16) add_columns(q);
  }
}

// sums[m][c] += weights[m][:] times columns 16 c to 16 c + 15 of the rows of `b`, below `width`.
template <int kM, int kN, int kD, class T>
ORTRAIN_DEVICE void add_weighted_rows(Accumulator (&sums)[kM][kD / 16],
                                      const Accumulator (&weights)[kM][kN], const T* b, int width) {
  constexpr int kStride = kFragmentStride<kD>;
  const auto add_rows = [&](int columns) {
    ORTRAIN_UNROLL
    for (int n = 0; n < kN; ++n) {
      FragmentA<T> left[kM];
      ORTRAIN_UNROLL
      for (int m = 0; m < kM; ++m) left[m].from(weights[m][n]);
      ORTRAIN_UNROLL
      for (int c = 0; c < kD / 16; ++c) {
        if (c * 16 >= columns) continue;
        FragmentB<T> right;
        right.load(b + n * 16 * kStride + c * 16, kStride);
        ORTRAIN_UNROLL
        for (int m = 0; m < kM; ++m) multiply_add(sums[m][c], left[m], right);
      }
    }
  };
  if (width > kD - 16) {  // as above
    add_rows(kD);
  } else {
    add_rows(width);
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

// 2 to the power x, to the accuracy of the unit; results below 2^-126 are 0.
ORTRAIN_DEVICE float power_of_two(float x) {
#if defined(__CUDACC__) && !defined(__HIPCC__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// Up to 64 keys of a tile that are seen, one bit each.
using KeyBits = uint64_t;

// Bit n: whether a mask of keys shows key + n, below kKeys. All lanes take part.
template <int kKeys>
ORTRAIN_DEVICE KeyBits seen_keys(const AttentionElements& elements, int key) {
  static_assert(kKeys <= 64);
  const AttentionMask& mask = elements.p.mask;
  const bool* const sees = static_cast<const bool*>(mask.data) + elements.b * mask.batch;
  KeyBits bits = 0;
  ORTRAIN_UNROLL
  for (int first = 0; first < kKeys; first += kWarpSize) {
    const int n = first + lane();
    const bool seen = n < kKeys && key + n < elements.span.keys && sees[(key + n) * mask.col];
    bits |= static_cast<KeyBits>(lanes_where(seen)) << first;
  }
  return bits;
}

// What hides scores of a tile or is added to them.
template <class T, AttentionForm kForm>
class FragmentMask {
 public:
  // The tile's queries and keys begin with these, and are as many at most. `all_keys`: whether as
  // many are there and seen, where kForm is masked_keys.
  ORTRAIN_DEVICE FragmentMask(const AttentionElements& elements, int query, int key,
                              int most_queries, int most_keys, bool all_keys)
      : elements_(elements), query_(query), key_(key) {
    const int queries = static_cast<int>(elements.span.queries);
    const int keys = static_cast<int>(elements.span.keys);
    if (kForm != AttentionForm::masked_keys) all_keys = most_keys <= keys - key;
    cuts_ = most_queries > queries - query || !all_keys ||
            (elements.p.causal && most_keys > query + 1 - key);
  }

  // Changes scores to those that, times what it returns, are scaled, masked and of base 2. That is
  // 0 or more. What most tiles need is kept short and apart.
  template <bool kKeysAreRows, int kM, int kN>
  ORTRAIN_DEVICE float apply(Accumulator (&scores)[kM][kN], float scale) const {
    const AttentionMask& mask = elements_.p.mask;
    if (kForm == AttentionForm::masked_keys) {
      if (cuts_) {
        // Read once more: the bits of all tiles would take registers.
        const KeyBits bits = seen_keys<(kKeysAreRows ? kM : kN) * 16>(elements_, key_);
        change<kKeysAreRows, false>(scores, [&](float score, int, int key) {
          return (bits >> key & 1) != 0 ? score : kNever;
        });
      }
      return scale;
    }
    if (is_plain(kForm) || (mask.kind == AttentionMask::Kind::none && scale > 0)) {
      if (cuts_) {
        change<kKeysAreRows, false>(scores, [&](float score, int, int) { return score; });
      }
      return scale;
    }
    const int64_t at = mask.at(elements_.b, elements_.h, query_, key_);
    if (mask.kind == AttentionMask::Kind::none) {
      change<kKeysAreRows, true>(scores, [&](float score, int, int) { return score * scale; });
    } else if (mask.kind == AttentionMask::Kind::boolean) {
      const bool* const data = static_cast<const bool*>(mask.data) + at;
      change<kKeysAreRows, true>(scores, [&](float score, int query, int key) {
        return data[query * mask.row + key * mask.col] ? score * scale : kNever;
      });
    } else {
      const T* const data = static_cast<const T*>(mask.data) + at;
      change<kKeysAreRows, true>(scores, [&](float score, int query, int key) {
        return score * scale + static_cast<float>(data[query * mask.row + key * mask.col]) * kLog2E;
      });
    }
    return 1.0f;
  }

 private:
  static constexpr float kNever = -std::numeric_limits<float>::infinity();
  // What is seen becomes change_one(score, query, key), both counted from the tile's first.
  template <bool kKeysAreRows, bool kApart, int kM, int kN, class Change>
  ORTRAIN_DEVICE void change(Accumulator (&scores)[kM][kN], const Change& change_one) const {
    const int queries = static_cast<int>(elements_.span.queries) - query_;
    const int keys = static_cast<int>(elements_.span.keys) - key_;
    // Key n is seen by query m where n - m < diagonal.
    const int diagonal = elements_.p.causal ? query_ + 1 - key_ : std::numeric_limits<int>::max();
    ORTRAIN_UNROLL
    for (int m = 0; m < kM; ++m) {
      ORTRAIN_UNROLL
      for (int n = 0; n < kN; ++n) {
        ORTRAIN_UNROLL
        for (int e = 0; e < Accumulator::kElements; ++e) {
          const int row = m * 16 + Accumulator::row_of(e);
          const int column = n * 16 + Accumulator::column_of(e);
          const int query = kKeysAreRows ? column : row;
          const int key = kKeysAreRows ? row : column;
          const bool seen = query < queries && key < keys && key - query < diagonal;
          scores[m][n].set(e, seen ? change_one(scores[m][n][e], query, key) : kNever);
        }
        // Loads of further tiles are not begun before: their addresses would take registers.
        if (kApart) warp_barrier();
      }
    }
  }

  const AttentionElements& elements_;
  int query_, key_;
  bool cuts_;
};

// Tiles of keys that a boolean mask hides from all queries are skipped, where the mask is the same
// for all queries. `all_keys`: whether the tile is full and seen as a whole, where kForm is
// masked_keys. All threads of the block take part.
template <int kKeys, AttentionForm kForm>
ORTRAIN_DEVICE int next_visible_tile(const AttentionElements& elements, int key, int end,
                                     bool& all_keys) {
  if (kForm == AttentionForm::plain) return key;
  if constexpr (kForm == AttentionForm::masked_keys) {
    for (; key < end; key += kKeys) {
      const KeyBits bits = seen_keys<kKeys>(elements, key);
      all_keys = bits == ~KeyBits{0} >> (64 - kKeys);
      if (bits != 0) break;
    }
    return key;
  }
  const AttentionMask& mask = elements.p.mask;
  if (mask.kind != AttentionMask::Kind::boolean || mask.row != 0) return key;
  static_assert(kKeys <= kFragmentThreads);
  for (; key < end; key += kKeys) {
    const int j = key + static_cast<int>(threadIdx.x);
    const bool sees = static_cast<int>(threadIdx.x) < kKeys && j < elements.span.keys &&
                      static_cast<const bool*>(mask.data)[mask.at(elements.b, elements.h, 0, j)];
    if (__syncthreads_or(sees)) break;
  }
  return key;
}

}  // namespace ortrain::gpu
