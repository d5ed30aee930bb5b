// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/ops/attention/attention_device.h"

// Arithmetic on tiles of queries and keys by 16 x 16 threads without matrix units. Each thread has
// kEach x kEach elements of a tile of scores: rows kEach * (thread / 16) + r, columns
// kEach * (thread % 16) + c.
namespace ortrain::gpu {

template <class T, int N>
struct alignas(sizeof(T) * N > 16 ? 16 : sizeof(T) * N) AttentionPack {
  T v[N];
};

// Rows of one operand: `count` of them, `width` elements each.
template <class T>
struct AttentionRows {
  const T* data;
  int64_t stride;
  int count;
  int width;
  bool packs;

  // Elements [column, column + 4) of a row, zeros outside.
  template <class C>
  ORTRAIN_DEVICE void read(int row, int column, C (&to)[4]) const {
    if (row >= count || column >= width) {
      ORTRAIN_UNROLL
      for (int e = 0; e < 4; ++e) to[e] = 0;
      return;
    }
    const T* const from = data + row * stride + column;
    if (packs) {
      const auto pack = *reinterpret_cast<const AttentionPack<T, 4>*>(from);
      ORTRAIN_UNROLL
      for (int e = 0; e < 4; ++e) to[e] = static_cast<C>(pack.v[e]);
    } else {
      ORTRAIN_UNROLL
      for (int e = 0; e < 4; ++e) to[e] = column + e < width ? static_cast<C>(from[e]) : C{0};
    }
  }
};

template <class T>
struct AttentionTiles {
  using C = ComputeType<T>;
  static constexpr int kThreads = 256;
  static constexpr int kEach = sizeof(C) == 8 ? 2 : 4;
  static constexpr int kTile = 16 * kEach;
  static constexpr int kStride = kTile + 4;  // keeps packs aligned, and spreads columns over banks
  static constexpr int kDepth = 64;
  static constexpr int kPanel = kDepth * kStride;   // elements of a panel [depth][row]
  static constexpr int kWeights = kTile * kStride;  // and of a tile of weights
  using Each = AttentionPack<C, kEach>;
  using Scores = C[kEach][kEach];

  // Elements [depth, depth + kDepth) of the rows, transposed: panel[d][row].
  ORTRAIN_DEVICE static void load_panel(C* panel, const AttentionRows<T>& rows, int depth) {
    const int left = rows.width - depth;
    const int pairs = ((left < kDepth ? left : kDepth) + 7) / 8;
    // Two neighbouring threads read 32 bytes of floats of a row, and a warp writes to all banks.
    for (int unit = threadIdx.x; unit < pairs * kTile * 2; unit += kThreads) {
      const int row = unit / 2 % kTile;
      const int d = (unit % 2 + unit / (2 * kTile) * 2) * 4;
      C values[4];
      rows.read(row, depth + d, values);
      ORTRAIN_UNROLL
      for (int e = 0; e < 4; ++e) panel[(d + e) * kStride + row] = values[e];
    }
  }

  // scores[r][c] += sum over d of a[d][r] b[d][c].
  ORTRAIN_DEVICE static void multiply(Scores& scores, const C* a, const C* b, int depth) {
    const int row = threadIdx.x / 16 * kEach;
    const int column = threadIdx.x % 16 * kEach;
#pragma unroll 4
    for (int d = 0; d < depth; ++d) {
      const Each left = *reinterpret_cast<const Each*>(a + d * kStride + row);
      const Each right = *reinterpret_cast<const Each*>(b + d * kStride + column);
      ORTRAIN_UNROLL
      for (int r = 0; r < kEach; ++r) {
        ORTRAIN_UNROLL
        for (int c = 0; c < kEach; ++c) scores[r][c] += left.v[r] * right.v[c];
      }
    }
  }

  // scores = a b^T over their whole width, through panels in shared memory. With `resident` all of
  // a is in its panel already.
  ORTRAIN_DEVICE static void products(Scores& scores, const AttentionRows<T>& a,
                                      const AttentionRows<T>& b, C* a_panel, C* b_panel,
                                      bool resident) {
    ORTRAIN_UNROLL
    for (int r = 0; r < kEach; ++r) {
      ORTRAIN_UNROLL
      for (int c = 0; c < kEach; ++c) scores[r][c] = 0;
    }
    int depth = 0;
    do {  // at least once, for the barriers
      __syncthreads();
      if (!resident) load_panel(a_panel, a, depth);
      load_panel(b_panel, b, depth);
      __syncthreads();
      const int left = a.width - depth;
      multiply(scores, a_panel + (resident ? depth * kStride : 0), b_panel,
               left < kDepth ? left : kDepth);
      depth += kDepth;
    } while (depth < a.width);
  }

  // Into shared memory: weights[column][row], for `Sums`.
  ORTRAIN_DEVICE static void store_weights(C* weights, const Scores& scores) {
    const int row = threadIdx.x / 16 * kEach;
    const int column = threadIdx.x % 16 * kEach;
    ORTRAIN_UNROLL
    for (int c = 0; c < kEach; ++c) {
      Each pack;
      ORTRAIN_UNROLL
      for (int r = 0; r < kEach; ++r) pack.v[r] = scores[r][c];
      *reinterpret_cast<Each*>(weights + (column + c) * kStride + row) = pack;
    }
  }

  // A tile's rows of results with kColumns columns, kColumns / 16 of them per thread.
  template <int kColumns>
  struct Sums {
    static constexpr int kWidth = kColumns / 16 < kEach ? kColumns / 16 : kEach;
    static constexpr int kPieces = kColumns / 16 / kWidth;
    static constexpr int kFit = kPanel / kColumns;
    static constexpr int kRows = kFit >= kTile ? kTile : kFit / 8 * 8;  // in a stage
    static_assert(kRows > 0 && kRows * kColumns <= kPanel);
    using Pack = AttentionPack<C, kWidth>;
    C value[kEach][kPieces][kWidth];

    ORTRAIN_DEVICE void clear() {
      ORTRAIN_UNROLL
      for (int r = 0; r < kEach; ++r) scale(r, 0);
    }
    ORTRAIN_DEVICE void scale(int r, C by) {
      ORTRAIN_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        ORTRAIN_UNROLL
        for (int e = 0; e < kWidth; ++e) value[r][piece][e] = by == 0 ? 0 : value[r][piece][e] * by;
      }
    }
    // value[row][column] += sum over k of weights[k][row] b[k][first column + column]. The stage
    // has kPanel elements and is written after a barrier, which also publishes the weights.
    ORTRAIN_DEVICE void add(const C* weights, const AttentionRows<T>& b, int first_column,
                            C* stage) {
      const int row = threadIdx.x / 16 * kEach;
      const int column = threadIdx.x % 16 * kWidth;
      for (int begin = 0; begin < b.count; begin += kRows) {
        const int rows = b.count - begin < kRows ? b.count - begin : kRows;
        __syncthreads();
        for (int unit = threadIdx.x; unit < rows * (kColumns / 4); unit += kThreads) {
          const int k = unit / (kColumns / 4);
          const int c = unit % (kColumns / 4) * 4;
          C values[4];
          b.read(begin + k, first_column + c, values);
          AttentionPack<C, 4> pack;
          ORTRAIN_UNROLL
          for (int e = 0; e < 4; ++e) pack.v[e] = values[e];
          *reinterpret_cast<AttentionPack<C, 4>*>(stage + k * kColumns + c) = pack;
        }
        __syncthreads();
#pragma unroll 2
        for (int k = 0; k < rows; ++k) {
          const Each left = *reinterpret_cast<const Each*>(weights + (begin + k) * kStride + row);
          ORTRAIN_UNROLL
          for (int piece = 0; piece < kPieces; ++piece) {
            const Pack right =
                *reinterpret_cast<const Pack*>(stage + k * kColumns + column + piece * 16 * kWidth);
            ORTRAIN_UNROLL
            for (int r = 0; r < kEach; ++r) {
              ORTRAIN_UNROLL
              for (int e = 0; e < kWidth; ++e) value[r][piece][e] += left.v[r] * right.v[e];
            }
          }
        }
      }
    }
    // Columns [first_column, width) of row `row` + r of the result, each times factor(r).
    template <class Factor>
    ORTRAIN_DEVICE void store(T* to, int64_t stride, int count, int first_column, int width,
                              bool packs, const Factor& factor) const {
      const int row = threadIdx.x / 16 * kEach;
      const int column = first_column + threadIdx.x % 16 * kWidth;
      ORTRAIN_UNROLL
      for (int r = 0; r < kEach; ++r) {
        if (row + r >= count) continue;
        const C by = factor(r);
        T* const line = to + (row + r) * stride;
        ORTRAIN_UNROLL
        for (int piece = 0; piece < kPieces; ++piece) {
          const int at = column + piece * 16 * kWidth;
          if (at >= width) continue;
          AttentionPack<T, kWidth> pack;
          ORTRAIN_UNROLL
          for (int e = 0; e < kWidth; ++e) pack.v[e] = static_cast<T>(value[r][piece][e] * by);
          if (packs) {
            *reinterpret_cast<AttentionPack<T, kWidth>*>(line + at) = pack;
            continue;
          }
          ORTRAIN_UNROLL
          for (int e = 0; e < kWidth; ++e) {
            if (at + e < width) line[at + e] = pack.v[e];
          }
        }
      }
    }
  };
};

// Sum or maximum over the 16 threads that share rows; all of them get it.
template <class C, class Op>
ORTRAIN_DEVICE C over_sixteen(C value, Op op) {
  ORTRAIN_UNROLL
  for (int mask = 8; mask > 0; mask /= 2) value = op(value, exchange_xor(value, mask));
  return value;
}

// Calls body(integral constant of the columns that a block computes): enough for `width`, or the
// most there are.
template <class Body>
void dispatch_columns(int width, const Body& body) {
  if (width <= 32) {
    body(std::integral_constant<int, 32>());
  } else if (width <= 64) {
    body(std::integral_constant<int, 64>());
  } else if (width <= 128) {
    body(std::integral_constant<int, 128>());
  } else {
    body(std::integral_constant<int, 256>());
  }
}

// Bytes of shared memory that one block may ask for.
#if defined(__HIPCC__)
inline constexpr size_t kMostSharedBytes = size_t{64} << 10;
#else
inline constexpr size_t kMostSharedBytes = size_t{96} << 10;
#endif

}  // namespace ortrain::gpu
