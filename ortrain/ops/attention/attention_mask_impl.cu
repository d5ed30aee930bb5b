// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ortrain/ops/attention/attention_kernels.h"
#include "ortrain/ops/attention/attention_pair.h"

// The gradient of a mask that is added to the scores: each block owns a tile of the mask and goes
// through all scores that it was added to, so that the sums have one order.
namespace ortrain::gpu {
namespace {

// Extents of the mask and of what it repeats over, rows and columns in tiles.
struct MaskGrid {
  int64_t batch, heads, rows, cols;
  int64_t each_batch, each_heads, each_rows, each_cols;
  int64_t parts;  // of the scores of one tile, summed apart
  int64_t size;   // elements of the mask

  int64_t tiles() const { return batch * heads * rows * cols; }
  ORTRAIN_HOST_DEVICE int64_t repeats() const {
    return each_batch * each_heads * each_rows * each_cols;
  }
};

MaskGrid grid_of(const AttentionProblem& p, int tile, int64_t size) {
  const auto tiles = [&](int64_t rows) { return (rows + tile - 1) / tile; };
  const AttentionMask& m = p.mask;
  MaskGrid grid{.batch = m.batch != 0 ? p.batch : 1,
                .heads = m.head != 0 ? p.heads : 1,
                .rows = m.row != 0 ? tiles(p.queries) : 1,
                .cols = m.col != 0 ? tiles(p.keys) : 1,
                .each_batch = m.batch != 0 ? 1 : p.batch,
                .each_heads = m.head != 0 ? 1 : p.heads,
                .each_rows = m.row != 0 ? 1 : tiles(p.queries),
                .each_cols = m.col != 0 ? 1 : tiles(p.keys),
                .parts = 1,
                .size = size};
  // Few tiles would leave most of a device idle.
  constexpr int64_t kBlocks = 512, kMostParts = 256;
  grid.parts = std::clamp<int64_t>(kBlocks / std::max<int64_t>(grid.tiles(), 1), 1,
                                   std::clamp<int64_t>(grid.repeats(), 1, kMostParts));
  return grid;
}

// S: the type of what is stored, T if there is one part.
template <class T, class S>
__global__ void __launch_bounds__(256)
    mask_gradient(AttentionBackwardProblem p, MaskGrid grid, S* sums) {
  using Tiles = AttentionTiles<T>;
  using C = typename Tiles::C;
  constexpr int kEach = Tiles::kEach;
  constexpr int kTile = Tiles::kTile;
  const AttentionProblem& f = p.forward;
  const AttentionSpan span{0, f.queries, f.keys};

  int64_t task = blockIdx.x;
  const int64_t part = task % grid.parts;
  task /= grid.parts;
  const int64_t col = task % grid.cols;
  task /= grid.cols;
  const int64_t row = task % grid.rows;
  task /= grid.rows;
  const int64_t mask_head = task % grid.heads;
  const int64_t mask_batch = task / grid.heads;

  C* const a_panel = dynamic_shared<C>();
  C* const b_panel = a_panel + Tiles::kPanel;
  const AttentionDropout dropout(f);
  C total[kEach][kEach] = {};

  const int64_t repeats = grid.repeats();
  for (int64_t n = part * repeats / grid.parts; n < (part + 1) * repeats / grid.parts; ++n) {
    const int64_t key = (col + n % grid.each_cols) * kTile;
    int64_t rest = n / grid.each_cols;
    const int64_t query = (row + rest % grid.each_rows) * kTile;
    rest /= grid.each_rows;
    const int64_t h = mask_head + rest % grid.each_heads;
    const int64_t b = mask_batch + rest / grid.each_heads;
    if (f.causal && key >= query + kTile) continue;
    AttentionPair<T, false> pair{
        p,
        {f, b, h, span},
        dropout,
        h / f.group(),
        query,
        key,
        static_cast<int>(f.queries - query < kTile ? f.queries - query : kTile),
        static_cast<int>(f.keys - key < kTile ? f.keys - key : kTile)};
    typename Tiles::Scores ds;
    pair.compute(ds, pair.visible(), true, a_panel, b_panel);
    ORTRAIN_UNROLL
    for (int r = 0; r < kEach; ++r) {
      ORTRAIN_UNROLL
      for (int c = 0; c < kEach; ++c) total[r][c] += ds[r][c];
    }
  }

  // Over the tile's own rows and columns where the mask has but one: [row][column] in memory.
  C* const tile = a_panel;
  __syncthreads();
  for (int r = 0; r < kEach; ++r) {
    for (int c = 0; c < kEach; ++c) {
      tile[(threadIdx.x / 16 * kEach + r) * kTile + threadIdx.x % 16 * kEach + c] = total[r][c];
    }
  }
  __syncthreads();
  const auto halve = [&](int row_stride, int column_stride) {
    for (int half = kTile / 2; half > 0; half /= 2) {
      for (int unit = threadIdx.x; unit < half * kTile; unit += Tiles::kThreads) {
        const int at = unit / kTile * row_stride + unit % kTile * column_stride;
        tile[at] += tile[at + half * row_stride];
      }
      __syncthreads();
    }
  };
  if (f.mask.row == 0) halve(kTile, 1);
  if (f.mask.col == 0) halve(1, kTile);
  const int64_t rows = f.mask.row == 0 ? 1 : f.queries - row * kTile;
  const int64_t cols = f.mask.col == 0 ? 1 : f.keys - col * kTile;
  for (int unit = threadIdx.x; unit < kTile * kTile; unit += Tiles::kThreads) {
    const int r = unit / kTile, c = unit % kTile;
    if (r >= rows || c >= cols) continue;
    const int64_t at = f.mask.at(mask_batch, mask_head, row * kTile + r, col * kTile + c);
    sums[part * grid.size + at] = static_cast<S>(tile[unit]);
  }
}

template <class T>
__global__ void sum_parts(const ComputeType<T>* sums, int64_t parts, int64_t size, T* dmask) {
  for_each_item(size, [&](int64_t item) {
    ComputeType<T> sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += sums[part * size + item];
    dmask[item] = static_cast<T>(sum);
  });
}

template <class T>
MaskGrid grid_for(const AttentionProblem& p, int64_t size) {
  return grid_of(p, AttentionTiles<T>::kTile, size);
}

template <class T, class S>
void launch_gradient(const AttentionBackwardProblem& p, const MaskGrid& grid, S* sums,
                     void* stream) {
  using Tiles = AttentionTiles<T>;
  launch(mask_gradient<T, S>,
         {.blocks = block_count(grid.tiles() * grid.parts),
          .threads = Tiles::kThreads,
          .shared_bytes = 2 * Tiles::kPanel * sizeof(typename Tiles::C)},
         stream, p, grid, sums);
}

}  // namespace

ByteCount attention_mask_workspace(DType type, const AttentionProblem& p, int64_t size) {
  return dispatch_float(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const MaskGrid grid = grid_for<T>(p, size);
    return grid.parts == 1 ? ByteCount() : bytes_of<ComputeType<T>>(grid.parts, size);
  });
}

void attention_mask_gradient(DType type, const AttentionBackwardProblem& p, int64_t size,
                             void* dmask, void* workspace, void* stream) {
  if (size == 0) return;
  dispatch_float(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    const MaskGrid grid = grid_for<T>(p.forward, size);
    if (grid.parts == 1) {
      launch_gradient<T>(p, grid, static_cast<T*>(dmask), stream);
      return;
    }
    launch_gradient<T>(p, grid, static_cast<C*>(workspace), stream);
    launch(sum_parts<T>, items(size), stream, static_cast<const C*>(workspace), grid.parts, size,
           static_cast<T*>(dmask));
  });
}

}  // namespace ortrain::gpu
