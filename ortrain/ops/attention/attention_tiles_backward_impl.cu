// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/reduce.h"
#include "ortrain/gpu/words.h"
#include "ortrain/ops/attention/attention_kernels.h"
#include "ortrain/ops/attention/attention_pair.h"

namespace ortrain::gpu {
namespace {

// What one block does: kColumns columns of dq for a tile of queries, or of dk or dv for a tile of
// keys. Probabilities are recomputed for each, so that every sum has one owner and one order.
struct BackwardGrid {
  int64_t tiles;      // of queries or keys
  int64_t chunks[2];  // of columns: of dq or dk, and of dv
};

template <class T, int kColumns, bool kOfKeys>
__global__ void __launch_bounds__(256, kColumns > 128 ? 1 : 2)
    backward_tiles(AttentionBackwardProblem p, BackwardGrid grid) {
  using Tiles = AttentionTiles<T>;
  using C = typename Tiles::C;
  constexpr int kTile = Tiles::kTile;
  const AttentionProblem& f = p.forward;

  int64_t task = blockIdx.x;
  const int64_t chunks = grid.chunks[0] + grid.chunks[1];
  const bool of_values = task % chunks >= grid.chunks[0];
  const int column = static_cast<int>(task % chunks - (of_values ? grid.chunks[0] : 0)) * kColumns;
  task /= chunks;
  // Under a causal mask the last queries and the first keys have the most to do: they begin first.
  const int64_t tile = kOfKeys ? task % grid.tiles : grid.tiles - 1 - task % grid.tiles;
  task /= grid.tiles;
  const int64_t owners = kOfKeys ? f.kv_heads : f.heads;
  const int64_t owner = task % owners;
  const int64_t b = task / owners;

  int64_t start;
  const AttentionSpan span = span_of_tile(f, tile, kTile, start);
  const int64_t end = kOfKeys ? span.keys : span.queries;
  if (start >= end) return;
  const int count = static_cast<int>(end - start < kTile ? end - start : kTile);

  C* const a_panel = dynamic_shared<C>();
  C* const b_panel = a_panel + Tiles::kPanel;
  C* const weights = b_panel + Tiles::kPanel;
  const AttentionDropout dropout(f);
  typename Tiles::template Sums<kColumns> sums;
  sums.clear();

  const int64_t first_head = kOfKeys ? owner * f.group() : owner;
  const int64_t heads = kOfKeys ? f.group() : 1;
  // The other side's rows that have to do with this tile's.
  int64_t from = 0, to = kOfKeys ? span.queries : span.keys;
  if (f.causal && kOfKeys) from = start;
  if (f.causal && !kOfKeys && start + count < to) to = start + count;
  for (int64_t h = first_head; h < first_head + heads; ++h) {
    for (int64_t other = from; other < to; other += kTile) {
      const int others = static_cast<int>(to - other < kTile ? to - other : kTile);
      AttentionPair<T, kOfKeys> pair{p,
                                     {f, b, h, span},
                                     dropout,
                                     kOfKeys ? owner : h / f.group(),
                                     kOfKeys ? other : start,
                                     kOfKeys ? start : other,
                                     kOfKeys ? others : count,
                                     kOfKeys ? count : others};
      const unsigned visible = pair.visible();
      if (f.mask.kind == AttentionMask::Kind::boolean && !__syncthreads_or(visible != 0)) continue;
      typename Tiles::Scores scores;
      pair.compute(scores, visible, !of_values, a_panel, b_panel);
      Tiles::store_weights(weights, scores);
      sums.add(weights, of_values ? pair.dout() : kOfKeys ? pair.q() : pair.k(), column, b_panel);
    }
  }

  const C scale = of_values ? C{1} : static_cast<C>(f.scale);
  const auto factor = [&](int) { return scale; };
  if (!kOfKeys) {
    sums.store(attention_row<T>(p.dq, f.q_strides, b, owner, span.first + start), f.q_strides.row,
               count, column, f.head_dim, p.dq_packs, factor);
  } else if (of_values) {
    sums.store(attention_row<T>(p.dv, f.v_strides, b, owner, span.first + start), f.v_strides.row,
               count, column, f.value_dim, p.dv_packs, factor);
  } else {
    sums.store(attention_row<T>(p.dk, f.k_strides, b, owner, span.first + start), f.k_strides.row,
               count, column, f.head_dim, p.dk_packs, factor);
  }
}

template <class T, bool kOfKeys>
void launch_backward(const AttentionBackwardProblem& p, bool first, bool second, void* stream) {
  using Tiles = AttentionTiles<T>;
  const AttentionProblem& f = p.forward;
  const int width = std::max(first ? f.head_dim : 0, second ? f.value_dim : 0);
  dispatch_columns(width, [&](auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    const auto chunks = [](bool wanted, int of) {
      return wanted ? (of + kColumns - 1) / kColumns : 0;
    };
    const BackwardGrid grid{.tiles = attention_tiles(f, kOfKeys ? f.keys : f.queries, Tiles::kTile),
                            .chunks = {chunks(first, f.head_dim), chunks(second, f.value_dim)}};
    const int64_t owners = (kOfKeys ? f.kv_heads : f.heads) * f.batch;
    launch(backward_tiles<T, kColumns, kOfKeys>,
           {.blocks = block_count(grid.tiles * owners * (grid.chunks[0] + grid.chunks[1])),
            .threads = Tiles::kThreads,
            .shared_bytes = (2 * Tiles::kPanel + Tiles::kWeights) * sizeof(typename Tiles::C)},
           stream, p, grid);
  });
}

// kLanes neighbouring lanes per row of dout and out.
template <class T, int kLanes, class Index>
__global__ void __launch_bounds__(kItemThreads)
    row_products(AttentionBackwardProblem p, Divider queries, Divider heads,
                 ComputeType<T>* delta) {
  using C = ComputeType<T>;
  const AttentionProblem& f = p.forward;
  const auto rows = static_cast<Index>(f.batch * f.heads * f.queries);
  const Index first = Index{blockIdx.x} * (blockDim.x / kLanes);
  const Index stride = Index{gridDim.x} * (blockDim.x / kLanes);
  const int member = static_cast<int>(threadIdx.x) % kLanes;
  for (Index of_block = first; of_block < rows; of_block += stride) {
    const Index row = of_block + threadIdx.x / kLanes;
    const bool is_there = row < rows;  // all lanes take part in exchanges
    C sum = 0;
    if (is_there) {
      const Index head = queries.divide(row), sample = heads.divide(head);
      const int64_t at = f.out_strides.at(sample, head - sample * static_cast<Index>(heads.divisor),
                                          row - head * static_cast<Index>(queries.divisor));
      const T* const dout = static_cast<const T*>(p.dout) + at;
      const T* const out = static_cast<const T*>(f.out) + at;
      if (p.dout_packs && f.out_packs) {
        using Four = AttentionPack<T, 4>;
        for (int c = member * 4; c < f.value_dim; c += kLanes * 4) {
          const Four a = *reinterpret_cast<const Four*>(dout + c);
          const Four b = *reinterpret_cast<const Four*>(out + c);
          ORTRAIN_UNROLL
          for (int e = 0; e < 4; ++e) sum += static_cast<C>(a.v[e]) * static_cast<C>(b.v[e]);
        }
      } else {
        for (int c = member; c < f.value_dim; c += kLanes) {
          sum += static_cast<C>(dout[c]) * static_cast<C>(out[c]);
        }
      }
    }
    ORTRAIN_UNROLL
    for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += exchange_xor(sum, mask);
    if (is_there && member == 0) delta[row] = sum;
  }
}

}  // namespace

void attention_backward_tiles(DType type, const AttentionBackwardProblem& p, void* stream) {
  dispatch_float(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (p.dq != nullptr) launch_backward<T, false>(p, true, false, stream);
    const bool dk = p.dk != nullptr, dv = p.dv != nullptr;
    if (dk || dv) launch_backward<T, true>(p, dk, dv, stream);
  });
}

void attention_row_products(DType type, const AttentionBackwardProblem& p, void* delta,
                            void* stream) {
  dispatch_float(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const AttentionProblem& f = p.forward;
    const int64_t rows = f.batch * f.heads * f.queries;
    const auto with_lanes = [&](auto lanes) {
      constexpr int kLanes = decltype(lanes)::value;
      dispatch_width(rows, [&](auto index) {
        launch(row_products<T, kLanes, decltype(index)>, items(rows * kLanes), stream, p,
               Divider(f.queries), Divider(f.heads), static_cast<ComputeType<T>*>(delta));
      });
    };
    // As few as the packs of a row give work to.
    if (f.value_dim <= 64) {
      with_lanes(std::integral_constant<int, 16>());
    } else {
      with_lanes(std::integral_constant<int, kWarpSize>());
    }
  });
}

}  // namespace ortrain::gpu
