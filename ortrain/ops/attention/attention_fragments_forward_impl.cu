// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/attention/attention_fragments.h"
#include "ortrain/ops/attention/attention_kernels.h"

namespace ortrain::gpu {
namespace {

template <int kD>
struct ForwardSizes {
#if defined(__HIPCC__)
  static constexpr int kM = 1;
  static constexpr int kKeys = kD > 128 ? 16 : kD > 64 ? 32 : 64;  // 64 KiB hold all of it
#else
  static constexpr int kM = kD > 128 ? 1 : 2;
  static constexpr int kKeys = kD > 64 ? 32 : 64;
#endif
  static constexpr int kQueries = kFragmentWarps * 16 * kM;
  static constexpr size_t kSharedBytes = (kQueries + 2 * kKeys) * kFragmentStride<kD> * size_t{2};
};

// A block per tile of queries of one head: an online softmax (Milakov and Gimelshein 2018), the
// order of Dao's FlashAttention-2 (2023): values are copied while scores are computed, the next
// keys while values are added up. Exponentials are of base 2.
template <class T, int kD>
__global__ void __launch_bounds__(kFragmentThreads)
    forward_fragments(AttentionProblem p, int64_t tiles) {
  using Sizes = ForwardSizes<kD>;
  constexpr int kM = Sizes::kM;
  constexpr int kKeys = Sizes::kKeys;
  constexpr int kN = kKeys / 16;
  constexpr int kStride = kFragmentStride<kD>;
  constexpr int kRowSlots = Accumulator::kRows;
  constexpr float kNever = -std::numeric_limits<float>::infinity();

  int64_t task = blockIdx.x;
  // The last queries see the most keys under a causal mask: they begin first.
  const int64_t tile = tiles - 1 - task % tiles;
  task /= tiles;
  const int64_t h = task % p.heads;
  const int64_t b = task / p.heads;
  const int64_t kv = h / p.group();
  int64_t start;
  const AttentionSpan span = span_of_tile(p, tile, Sizes::kQueries, start);
  if (start >= span.queries) return;

  T* const query_tile = dynamic_shared<T>();
  T* const key_tile = query_tile + Sizes::kQueries * kStride;
  T* const value_tile = key_tile + kKeys * kStride;
  T* const own_queries = query_tile + warp() * kM * 16 * kStride;
  const auto load_keys = [&](int64_t key) {
    load_rows<kKeys, kD, T>(key_tile, {attention_row<T>(p.k, p.k_strides, b, kv, span.first + key),
                                       p.k_strides.row, span.keys - key, p.head_dim, p.k_packs});
  };
  const auto load_values = [&](int64_t key) {
    load_rows<kKeys, kD, T>(
        value_tile, {attention_row<T>(p.v, p.v_strides, b, kv, span.first + key), p.v_strides.row,
                     span.keys - key, p.value_dim, p.v_packs});
  };
  load_rows<Sizes::kQueries, kD, T>(
      query_tile, {attention_row<T>(p.q, p.q_strides, b, h, span.first + start), p.q_strides.row,
                   span.queries - start, p.head_dim, p.q_packs});

  const AttentionElements elements{p, b, h, span};
  const AttentionDropout dropout(p);
  const float scale = static_cast<float>(p.scale) * kLog2E;
  const int64_t own_start = start + warp() * kM * 16;
  Accumulator sums[kM][kD / 16];
  float top[kM][kRowSlots], total[kM][kRowSlots];
  ORTRAIN_UNROLL
  for (int m = 0; m < kM; ++m) {
    ORTRAIN_UNROLL
    for (int c = 0; c < kD / 16; ++c) sums[m][c].fill(0);
    ORTRAIN_UNROLL
    for (int slot = 0; slot < kRowSlots; ++slot) {
      top[m][slot] = kNever;
      total[m][slot] = 0;
    }
  }

  const int64_t last = start + Sizes::kQueries;
  const int64_t seen = p.causal && last < span.keys ? last : span.keys;
  int64_t key = next_visible_tile<kKeys>(elements, 0, seen);
  if (key < seen) load_keys(key);
  end_copy_group();
  while (key < seen) {
    wait_for_copies<0>();
    __syncthreads();  // the keys are there, and everyone is done with the values
    load_values(key);
    end_copy_group();
    // Rows above the diagonal have nothing to do here.
    const bool idle = p.causal && key >= own_start + kM * 16;
    Accumulator scores[kM][kN];
    if (!idle) multiply_rows<kM, kN, kD>(scores, own_queries, key_tile, p.head_dim);
    const int64_t following = next_visible_tile<kKeys>(elements, key + kKeys, seen);
    wait_for_copies<0>();
    __syncthreads();  // the values are there, and everyone is done with the keys
    if (following < seen) load_keys(following);
    end_copy_group();

    const FragmentMask<T> mask(elements, own_start, key, kM * 16, kKeys);
    ORTRAIN_UNROLL
    for (int m = 0; m < kM; ++m) {
      if (idle) continue;
      float highest[kRowSlots];
      ORTRAIN_UNROLL
      for (int slot = 0; slot < kRowSlots; ++slot) highest[slot] = top[m][slot];
      ORTRAIN_UNROLL
      for (int n = 0; n < kN; ++n) {
        ORTRAIN_UNROLL
        for (int e = 0; e < Accumulator::kElements; ++e) {
          float score = scores[m][n][e] * scale;
          if (mask.hides()) {
            score = mask.apply(score, m * 16 + Accumulator::row_of(e),
                               n * 16 + Accumulator::column_of(e));
          }
          scores[m][n].set(e, score);
          float& most = highest[Accumulator::row_slot(e)];
          most = score > most ? score : most;
        }
      }
      ORTRAIN_UNROLL
      for (int slot = 0; slot < kRowSlots; ++slot) {
        const float now = Accumulator::reduce_over_row(highest[slot], Max());
        // While nothing is seen, any finite number does.
        highest[slot] = now == kNever ? 0.0f : now;
        const float shrink = exp2f(top[m][slot] - highest[slot]);
        top[m][slot] = now;
        total[m][slot] *= shrink;
        ORTRAIN_UNROLL
        for (int c = 0; c < kD / 16; ++c) {
          ORTRAIN_UNROLL
          for (int e = 0; e < Accumulator::kElements; ++e) {
            if (Accumulator::row_slot(e) == slot) sums[m][c].set(e, sums[m][c][e] * shrink);
          }
        }
      }
      ORTRAIN_UNROLL
      for (int n = 0; n < kN; ++n) {
        ORTRAIN_UNROLL
        for (int e = 0; e < Accumulator::kElements; ++e) {
          const int slot = Accumulator::row_slot(e);
          const float share = exp2f(scores[m][n][e] - highest[slot]);
          total[m][slot] += share;  // of this lane's elements
          scores[m][n].set(e, share);
        }
      }
      if (p.drops) {
        ORTRAIN_UNROLL
        for (int n = 0; n < kN; ++n) {
          const FragmentDropout kept(dropout, elements, own_start + m * 16, key + n * 16);
          ORTRAIN_UNROLL
          for (int e = 0; e < Accumulator::kElements; ++e) {
            if (!kept.template keeps<false>(e)) scores[m][n].set(e, 0);
          }
        }
      }
    }
    if (!idle) add_weighted_rows<kM, kN, kD>(sums, scores, value_tile, p.value_dim);
    key = following;
  }

  wait_for_copies<0>();
  __syncthreads();  // the tile of queries becomes the staging place of results
  ORTRAIN_UNROLL
  for (int m = 0; m < kM; ++m) {
    ORTRAIN_UNROLL
    for (int slot = 0; slot < kRowSlots; ++slot) {
      total[m][slot] = Accumulator::reduce_over_row(total[m][slot], Sum());
    }
  }
  const float kept = p.drops ? static_cast<float>(p.kept) : 1.0f;
  store_rows<kM, kD>(
      own_queries, sums, attention_row<T>(p.out, p.out_strides, b, h, span.first + own_start),
      p.out_strides.row, span.queries - own_start, p.value_dim, p.out_packs,
      [&](int m, int slot) { return total[m][slot] == 0 ? 0.0f : kept / total[m][slot]; });
  if (p.logsumexp == nullptr || Accumulator::column_of(0) != 0) return;
  ORTRAIN_UNROLL
  for (int m = 0; m < kM; ++m) {
    ORTRAIN_UNROLL
    for (int slot = 0; slot < kRowSlots; ++slot) {
      const int64_t i = own_start + m * 16 + Accumulator::row_of_slot(slot);
      if (i >= span.queries) continue;
      static_cast<float*>(p.logsumexp)[p.row(b, h, span.first + i)] =
          total[m][slot] == 0 ? std::numeric_limits<float>::infinity()
                              : top[m][slot] * kLn2 + logf(total[m][slot]);
    }
  }
}

template <class T, int kD>
void launch_forward(const AttentionProblem& p, void* stream) {
  using Sizes = ForwardSizes<kD>;
  const int64_t tiles = attention_tiles(p, p.queries, Sizes::kQueries);
  launch(forward_fragments<T, kD>,
         {.blocks = block_count(tiles * p.heads * p.batch),
          .threads = kFragmentThreads,
          .shared_bytes = Sizes::kSharedBytes},
         stream, p, tiles);
}

template <class T>
void launch_forward_of(const AttentionProblem& p, void* stream) {
  const int width = std::max(p.head_dim, p.value_dim);
  if (width <= 64) {
    launch_forward<T, 64>(p, stream);
  } else if (width <= 128) {
    launch_forward<T, 128>(p, stream);
  } else {
    launch_forward<T, 256>(p, stream);
  }
}

}  // namespace

void attention_forward_fragments(DType type, const AttentionProblem& p, void* stream) {
  if (type == DType::f16) {
    launch_forward_of<Float16>(p, stream);
  } else {
    launch_forward_of<BFloat16>(p, stream);
  }
}

}  // namespace ortrain::gpu
