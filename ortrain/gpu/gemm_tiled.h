// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/gpu/gemm_kernel.h"
#include "ortrain/gpu/gemm_tile.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/launch.h"

// Matrix products by tiles: what the files that compile them for their types share.
namespace ortrain::gpu {

// Where the matrices of one member of the batch begin.
struct BatchAxes {
  int rank = 0;
  int64_t count = 1;
  BatchAxis axes[kMaxBatchAxes];

  explicit BatchAxes(const std::vector<BatchAxis>& batch) : rank(static_cast<int>(batch.size())) {
    for (int i = 0; i < rank; ++i) {
      axes[i] = batch[static_cast<size_t>(i)];
      count *= axes[i].count;
    }
  }
  // As an axis with its offsets in the place of its strides.
  ORTRAIN_DEVICE BatchAxis at(int64_t member) const {
    BatchAxis offsets;
    for (int i = rank; i-- > 0;) {
      const int64_t position = member % axes[i].count;
      member /= axes[i].count;
      offsets.a += position * axes[i].a;
      offsets.b += position * axes[i].b;
      offsets.c += position * axes[i].c;
      offsets.d += position * axes[i].d;
    }
    return offsets;
  }
};

// alpha sum + beta C + bias, rounded to T.
template <class T>
struct GemmEpilogue {
  using C = ComputeType<T>;
  T* d;
  int64_t ldd;
  C alpha, beta;
  const T* c;  // or null
  int64_t c_row, c_column;
  const T* bias;  // or null
  bool bias_of_rows;

  GemmEpilogue(const GemmProblem& p, const GemmOperands& operands)
      : d(static_cast<T*>(operands.d)),
        ldd(p.ldd),
        alpha(static_cast<C>(p.alpha)),
        beta(static_cast<C>(p.beta)),
        c(p.beta == 0.0 ? nullptr : static_cast<const T*>(operands.c)),
        c_row(p.c_row),
        c_column(p.c_column),
        bias(p.bias == BiasAlong::none ? nullptr : static_cast<const T*>(operands.bias)),
        bias_of_rows(p.bias == BiasAlong::rows) {}

  ORTRAIN_DEVICE void put(const BatchAxis& offsets, int64_t row, int64_t column, C sum) const {
    C value = alpha * sum;
    if (c != nullptr) {
      value += beta * static_cast<C>(c[offsets.c + row * c_row + column * c_column]);
    }
    if (bias != nullptr) value += static_cast<C>(bias[bias_of_rows ? row : column]);
    d[offsets.d + row * ldd + column] = static_cast<T>(value);
  }
};

// Which tile of [tiles_m, tiles_n] a block has: blocks that run at the same time share factors when
// they form a square rather than a long row.
struct TilePlace {
  int64_t row, column;
  ORTRAIN_DEVICE TilePlace(int64_t block, int64_t tiles_m, int64_t tiles_n) {
    constexpr int64_t kBand = 8;
    const int64_t band = block / (kBand * tiles_n);
    const int64_t inside = block % (kBand * tiles_n);
    const int64_t left = tiles_m - band * kBand;
    const int64_t height = left < kBand ? left : kBand;
    row = band * kBand + inside % height;
    column = inside / height;
  }
};

// Block (x, y, z): a tile, a member of the batch, a part of the inner extent. Sums that are kept,
// or of several parts, go to `partial` [parts, batch, m, n]; of one part, added to `before`, or
// null.
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    gemm_tiles(MatrixView<T> a, MatrixView<T> b, int64_t m, int64_t n, int64_t k, BatchAxes batch,
               int64_t part_depth, GemmEpilogue<T> epilogue, typename Tile::Value* partial,
               const typename Tile::Value* before) {
  const int64_t tiles_n = (n + Tile::kColumns - 1) / Tile::kColumns;
  const TilePlace place(blockIdx.x, (m + Tile::kRows - 1) / Tile::kRows, tiles_n);
  const int64_t row = place.row * Tile::kRows, column = place.column * Tile::kColumns;
  const int64_t begin = blockIdx.z * part_depth;
  const int64_t end = begin + part_depth < k ? begin + part_depth : k;
  Tile tile;
  for (int64_t member = blockIdx.y; member < batch.count; member += gridDim.y) {
    const BatchAxis offsets = batch.at(member);
    MatrixView<T> own_a = a, own_b = b;
    own_a.data += offsets.a;
    own_b.data += offsets.b;
    tile.multiply(own_a, own_b, row, column, begin, end);
    const int64_t first = (blockIdx.z * batch.count + member) * m * n;
    typename Tile::Value* part = partial == nullptr ? nullptr : partial + first;
    tile.each_sum([&](int i, int j, typename Tile::Value sum) {
      if (row + i >= m || column + j >= n) return;
      if (part != nullptr) {
        const int64_t at = (row + i) * n + column + j;
        part[at] = before == nullptr ? sum : before[first + at] + sum;
      } else {
        epilogue.put(offsets, row + i, column + j, sum);
      }
    });
  }
}

template <class T>
__global__ void __launch_bounds__(kItemThreads)
    finish_parts(const ComputeType<T>* partial, int64_t parts, int64_t m, int64_t n,
                 BatchAxes batch, GemmEpilogue<T> epilogue) {
  const int64_t each = batch.count * m * n;
  for_each_item(each, [&](int64_t i) {
    ComputeType<T> sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += partial[part * each + i];
    epilogue.put(batch.at(i / (m * n)), i % (m * n) / n, i % n, sum);
  });
}

// The same without an epilogue, added to `before`, or null.
template <class C>
__global__ void __launch_bounds__(kItemThreads)
    add_parts(const C* partial, int64_t parts, int64_t each, const C* before, C* d) {
  for_each_item(each, [&](int64_t i) {
    C sum = before == nullptr ? C{0} : before[i];
    for (int64_t part = 0; part < parts; ++part) sum += partial[part * each + i];
    d[i] = sum;
  });
}

template <class T>
bool begins_at_vectors(const void* data, int64_t ld, const std::vector<BatchAxis>& batch,
                       int64_t BatchAxis::* stride) {
  constexpr int64_t kVector = 16 / sizeof(T);
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && ld % kVector == 0 &&
         std::ranges::all_of(batch,
                             [&](const BatchAxis& axis) { return axis.*stride % kVector == 0; });
}

// How many parts of the inner extent: as many as give every multiprocessor a tile, each deep enough
// to be worth the memory for its sums.
inline int64_t parts_of(int64_t tiles, int64_t k) {
  constexpr int64_t kLeastDepth = 256, kMostParts = 32;
  const int64_t wanted = multiprocessors(current_device()) / std::max<int64_t>(tiles, 1);
  return std::clamp<int64_t>(std::min(wanted, k / kLeastDepth), 1, kMostParts);
}

template <class T, class Tile>
GemmKernel tiled_gemm_by(const GemmProblem& p) {
  using C = ComputeType<T>;
  static_assert(std::is_same_v<C, typename Tile::Value>);
  const BatchAxes batch(p.batch);
  const int64_t tiles =
      ((p.m + Tile::kRows - 1) / Tile::kRows) * ((p.n + Tile::kColumns - 1) / Tile::kColumns);
  int64_t parts = parts_of(tiles * batch.count, p.k);
  const int64_t steps = (p.k + Tile::kDepth - 1) / Tile::kDepth;
  const int64_t part_depth = std::max<int64_t>((steps + parts - 1) / parts, 1) * Tile::kDepth;
  parts = std::max<int64_t>((p.k + part_depth - 1) / part_depth, 1);
  const int64_t sums = count_elements(batch.count, p.m, p.n);
  GemmKernel kernel{.name = "tiled"};
  if (parts > 1) kernel.workspace_bytes = bytes_of<C>(parts, sums);
  kernel.run = [=](const GemmOperands& operands, void* workspace, void* stream) {
    const MatrixView<T> a{static_cast<const T*>(operands.a), p.trans_a ? p.k : p.m,
                          p.trans_a ? p.m : p.k, p.lda,
                          begins_at_vectors<T>(operands.a, p.lda, p.batch, &BatchAxis::a)};
    const MatrixView<T> b{static_cast<const T*>(operands.b), p.trans_b ? p.n : p.k,
                          p.trans_b ? p.k : p.n, p.ldb,
                          begins_at_vectors<T>(operands.b, p.ldb, p.batch, &BatchAxis::b)};
    const GemmEpilogue<T> epilogue(p, operands);
    C* partial = parts > 1     ? static_cast<C*>(workspace)
                 : p.keep_sums ? static_cast<C*>(operands.d)
                               : nullptr;
    const C* before = p.keep_sums && p.beta != 0.0 ? static_cast<const C*>(operands.c) : nullptr;
    launch(gemm_tiles<T, Tile>,
           {.blocks = block_count(tiles),
            .threads = Tile::kThreads,
            .shared_bytes = Tile::kSharedBytes,
            .blocks_y = static_cast<unsigned>(std::min<int64_t>(batch.count, 65535)),
            .blocks_z = static_cast<unsigned>(parts)},
           stream, a, b, p.m, p.n, p.k, batch, part_depth, epilogue, partial,
           parts > 1 ? nullptr : before);
    if (parts > 1 && p.keep_sums) {
      launch(add_parts<C>, items(sums), stream, partial, parts, sums, before,
             static_cast<C*>(operands.d));
    } else if (parts > 1) {
      launch(finish_parts<T>, items(sums), stream, partial, parts, p.m, p.n, batch, epilogue);
    }
    return true;
  };
  return kernel;
}

template <class T, bool kLarge>
GemmKernel tiled_gemm_sized(const GemmProblem& p) {
  if (p.trans_a) {
    return p.trans_b ? tiled_gemm_by<T, typename TileOf<T, kLarge, true, true>::Type>(p)
                     : tiled_gemm_by<T, typename TileOf<T, kLarge, true, false>::Type>(p);
  }
  return p.trans_b ? tiled_gemm_by<T, typename TileOf<T, kLarge, false, true>::Type>(p)
                   : tiled_gemm_by<T, typename TileOf<T, kLarge, false, false>::Type>(p);
}

// Large tiles where they are filled and every multiprocessor gets one.
inline bool takes_large_tiles(const GemmProblem& p) {
  constexpr int64_t kLargest = 128;
  const int64_t tiles = ((p.m + kLargest - 1) / kLargest) * ((p.n + kLargest - 1) / kLargest) *
                        BatchAxes(p.batch).count;
  return p.m > kLargest / 2 && p.n > kLargest / 2 && tiles >= multiprocessors(current_device());
}

template <class T>
GemmKernel tiled_gemm_of(const GemmProblem& p) {
  if constexpr (sizeof(T) <= 4 && !std::is_integral_v<T>) {
    if (takes_large_tiles(p)) return tiled_gemm_sized<T, true>(p);
  }
  return tiled_gemm_sized<T, false>(p);
}

}  // namespace ortrain::gpu
