// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/reduce.h"
#include "ortrain/ops/attention/attention_kernels.h"
#include "ortrain/ops/attention/attention_tiles.h"

namespace ortrain::gpu {
namespace {

// What one block does: a tile of queries of one head, kColumns columns of the result.
struct ForwardGrid {
  int64_t tiles;   // of queries
  int64_t chunks;  // of columns
  bool resident;   // the queries stay in shared memory
};

// An online softmax (Milakov and Gimelshein 2018) over tiles of keys; the matrix of scores is never
// in memory (Dao et al. 2022).
template <class T, int kColumns>
__global__ void __launch_bounds__(256, kColumns > 128 ? 1 : 2)
    forward_tiles(AttentionProblem p, ForwardGrid grid) {
  using Tiles = AttentionTiles<T>;
  using C = typename Tiles::C;
  constexpr int kEach = Tiles::kEach;
  constexpr int kTile = Tiles::kTile;
  constexpr C kNever = -std::numeric_limits<C>::infinity();

  int64_t task = blockIdx.x;
  const int column = static_cast<int>(task % grid.chunks) * kColumns;
  task /= grid.chunks;
  // The last queries see the most keys under a causal mask: they begin first.
  const int64_t tile = grid.tiles - 1 - task % grid.tiles;
  task /= grid.tiles;
  const int64_t h = task % p.heads;
  const int64_t b = task / p.heads;
  const int64_t kv = h / p.group();

  int64_t start;
  const AttentionSpan span = span_of_tile(p, tile, kTile, start);
  if (start >= span.queries) return;
  const int count = static_cast<int>(span.queries - start < kTile ? span.queries - start : kTile);

  C* const key_panel = dynamic_shared<C>();
  C* const weights = key_panel + Tiles::kPanel;
  C* const query_panel = weights + Tiles::kWeights;
  const AttentionRows<T> queries{attention_row<T>(p.q, p.q_strides, b, h, span.first + start),
                                 p.q_strides.row, count, p.head_dim, p.q_packs};
  if (grid.resident) {
    for (int depth = 0; depth < p.head_dim; depth += Tiles::kDepth) {
      Tiles::load_panel(query_panel + depth * Tiles::kStride, queries, depth);
    }
  }

  const AttentionElements elements{p, b, h, span};
  const AttentionDropout dropout(p);
  const C scale = static_cast<C>(p.scale);
  const int row = threadIdx.x / 16 * kEach;
  const int first_key = threadIdx.x % 16 * kEach;
  typename Tiles::template Sums<kColumns> sums;
  sums.clear();
  C top[kEach], total[kEach];
  ORTRAIN_UNROLL
  for (int r = 0; r < kEach; ++r) {
    top[r] = kNever;
    total[r] = 0;
  }

  const int64_t seen = p.causal && start + count < span.keys ? start + count : span.keys;
  for (int64_t key = 0; key < seen; key += kTile) {
    const unsigned visible = elements.visible<kEach>(start + row, key + first_key, kEach, 1);
    if (p.mask.kind == AttentionMask::Kind::boolean && !__syncthreads_or(visible != 0)) continue;

    const int keys = static_cast<int>(span.keys - key < kTile ? span.keys - key : kTile);
    typename Tiles::Scores scores;
    Tiles::products(scores, queries,
                    {attention_row<T>(p.k, p.k_strides, b, kv, span.first + key), p.k_strides.row,
                     keys, p.head_dim, p.k_packs},
                    query_panel, key_panel, grid.resident);
    ORTRAIN_UNROLL
    for (int r = 0; r < kEach; ++r) {
      C highest = top[r];
      ORTRAIN_UNROLL
      for (int c = 0; c < kEach; ++c) {
        const bool sees = (visible >> (r * kEach + c)) & 1u;
        C& score = scores[r][c];
        score = sees ? score * scale : kNever;
        if (sees) score += elements.added<T>(start + row + r, key + first_key + c);
        highest = score > highest ? score : highest;
      }
      highest = over_sixteen(highest, Max());
      // While nothing is seen, any finite number does.
      const C shift = highest == kNever ? C{0} : highest;
      C sum = 0;
      ORTRAIN_UNROLL
      for (int c = 0; c < kEach; ++c) {
        scores[r][c] = exp(scores[r][c] - shift);
        sum += scores[r][c];
      }
      const C shrink = exp(top[r] - shift);
      top[r] = highest;
      total[r] = total[r] * shrink + over_sixteen(sum, Sum());
      if (shrink != C{1}) sums.scale(r, shrink);
    }
    if (p.drops) {
      const unsigned kept = dropout.kept<kEach>(elements, start + row, key + first_key, kEach, 1);
      ORTRAIN_UNROLL
      for (int r = 0; r < kEach; ++r) {
        ORTRAIN_UNROLL
        for (int c = 0; c < kEach; ++c) {
          scores[r][c] *= (kept >> (r * kEach + c)) & 1u ? static_cast<C>(p.kept) : C{0};
        }
      }
    }
    Tiles::store_weights(weights, scores);
    sums.add(weights,
             {attention_row<T>(p.v, p.v_strides, b, kv, span.first + key), p.v_strides.row, keys,
              p.value_dim, p.v_packs},
             column, key_panel);
  }

  sums.store(attention_row<T>(p.out, p.out_strides, b, h, span.first + start), p.out_strides.row,
             count, column, p.value_dim, p.out_packs,
             [&](int r) { return total[r] == 0 ? C{0} : C{1} / total[r]; });
  if (p.logsumexp == nullptr || column != 0 || threadIdx.x % 16 != 0) return;
  ORTRAIN_UNROLL
  for (int r = 0; r < kEach; ++r) {
    if (row + r >= count) continue;
    static_cast<C*>(p.logsumexp)[p.row(b, h, span.first + start + row + r)] =
        total[r] == 0 ? std::numeric_limits<C>::infinity() : top[r] + static_cast<C>(log(total[r]));
  }
}

}  // namespace

void attention_forward_tiles(DType type, const AttentionProblem& p, void* stream) {
  dispatch_float(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Tiles = AttentionTiles<T>;
    dispatch_columns(p.value_dim, [&](auto columns) {
      constexpr int kColumns = decltype(columns)::value;
      const size_t size = sizeof(typename Tiles::C);
      const size_t others = (Tiles::kPanel + Tiles::kWeights) * size;
      const size_t all_queries =
          (static_cast<size_t>(p.head_dim) + 7) / 8 * 8 * Tiles::kStride * size;
      const ForwardGrid grid{.tiles = attention_tiles(p, p.queries, Tiles::kTile),
                             .chunks = std::max((p.value_dim + kColumns - 1) / kColumns, 1),
                             .resident = others + all_queries <= kMostSharedBytes};
      launch(forward_tiles<T, kColumns>,
             {.blocks = block_count(grid.tiles * grid.chunks * p.heads * p.batch),
              .threads = Tiles::kThreads,
              .shared_bytes = others + (grid.resident ? all_queries : Tiles::kPanel * size)},
             stream, p, grid);
    });
  });
}

}  // namespace ortrain::gpu
