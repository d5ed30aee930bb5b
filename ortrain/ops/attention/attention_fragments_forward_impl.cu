// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/attention/attention_fragments.h"
#include "ortrain/ops/attention/attention_kernels.h"

namespace ortrain::gpu {
namespace {

// What was fastest on an H200; kBlocks of them fit the registers of a multiprocessor.
template <int kD>
struct ForwardSizes {
  static constexpr int kM = 1;
#if defined(__HIPCC__)
  static constexpr int kKeys = kD > 128 ? 16 : kD > 64 ? 32 : 64;
  static constexpr int kStages = 1;  // 64 KiB hold all of it
  static constexpr int kBlocks = 1, kPlainBlocks = 1;
#else
  static constexpr int kKeys = kD > 128 ? 16 : 64;
  static constexpr int kStages = 2;  // the next tiles are copied meanwhile
  static constexpr int kBlocks = kD > 128 ? 1 : kD > 64 ? 2 : 3;
  static constexpr int kPlainBlocks = kD > 64 ? kBlocks : 4;
#endif
  static constexpr int kQueries = kFragmentWarps * 16 * kM;
  static constexpr size_t kSharedBytes =
      (kQueries + kStages * 2 * kKeys) * kFragmentStride<kD> * size_t{2};
};

// A block per tile of queries of one head: an online softmax (Milakov and Gimelshein 2018) as in
// Dao's FlashAttention-2 (2023). Exponentials are of base 2.
template <class T, int kD, AttentionForm kForm>
__global__ void __launch_bounds__(kFragmentThreads, is_plain(kForm) ? ForwardSizes<kD>::kPlainBlocks
                                                                    : ForwardSizes<kD>::kBlocks)
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
  int64_t tile_start;
  const AttentionSpan span = fragment_span<kForm>(p, tile, Sizes::kQueries, tile_start);
  if (tile_start >= span.queries) return;
  const int start = static_cast<int>(tile_start);
  const int head_dim = is_plain(kForm) ? kD : p.head_dim,
            value_dim = is_plain(kForm) ? kD : p.value_dim;
  const int queries = static_cast<int>(span.queries), keys = static_cast<int>(span.keys);

  T* const query_tile = dynamic_shared<T>();
  T* const inner = query_tile + Sizes::kQueries * kStride;  // keys and values of each stage
  T* const own_queries = query_tile + warp() * kM * 16 * kStride;
  using Rows = FragmentRows<T, kD, kForm>;
  const Rows key_rows(attention_row<T>(p.k, p.k_strides, b, kv, span.first), p.k_strides.row, keys,
                      p.head_dim, p.k_packs);
  const Rows value_rows(attention_row<T>(p.v, p.v_strides, b, kv, span.first), p.v_strides.row,
                        keys, p.value_dim, p.v_packs);
  const auto load_inner = [&](int stage, int key) {
    T* const to = inner + stage * 2 * kKeys * kStride;
    key_rows.template load<kKeys>(to, key);
    value_rows.template load<kKeys>(to + kKeys * kStride, key);
  };
  Rows(attention_row<T>(p.q, p.q_strides, b, h, span.first), p.q_strides.row, queries, p.head_dim,
       p.q_packs)
      .template load<Sizes::kQueries>(query_tile, start);

  const AttentionElements elements{p, b, h, span};
  const AttentionDropout dropout(p);
  const float scale = static_cast<float>(p.scale) * kLog2E;
  const int own_start = start + warp() * kM * 16;
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

  const int last = start + Sizes::kQueries;
  const int seen = p.causal && last < keys ? last : keys;
  bool all_keys = false;  // of the tile are seen
  int key = next_visible_tile<kKeys, kForm>(elements, 0, seen, all_keys);
  if (key < seen) load_inner(0, key);
  end_copy_group();
  int stage = 0;
  while (key < seen) {
    wait_for_copies<0>();
    __syncthreads();  // this stage is there, and everyone is done with the other one
    bool all_following = false;
    const int following =
        next_visible_tile<kKeys, kForm>(elements, key + kKeys, seen, all_following);
    if (Sizes::kStages == 2) {
      if (following < seen) load_inner(1 - stage, following);
      end_copy_group();
    }
    const T* const key_tile = inner + stage * 2 * kKeys * kStride;
    const T* const value_tile = key_tile + kKeys * kStride;
    // Rows above the diagonal have nothing to do here.
    const bool idle = p.causal && key >= own_start + kM * 16;
    if (!idle) {
      Accumulator scores[kM][kN];
      multiply_rows<kM, kN, kD>(scores, own_queries, key_tile, head_dim);
      const float unit = FragmentMask<T, kForm>(elements, own_start, key, kM * 16, kKeys, all_keys)
                             .template apply<false>(scores, scale);
      ORTRAIN_UNROLL
      for (int m = 0; m < kM; ++m) {
        float highest[kRowSlots];
        ORTRAIN_UNROLL
        for (int slot = 0; slot < kRowSlots; ++slot) highest[slot] = kNever;
        ORTRAIN_UNROLL
        for (int n = 0; n < kN; ++n) {
          ORTRAIN_UNROLL
          for (int e = 0; e < Accumulator::kElements; ++e) {
            float& most = highest[Accumulator::row_slot(e)];
            most = fmaxf(most, scores[m][n][e]);
          }
        }
        float shrink[kRowSlots];
        bool shrinks = false;
        ORTRAIN_UNROLL
        for (int slot = 0; slot < kRowSlots; ++slot) {
          const float now =
              fmaxf(Accumulator::reduce_over_row(highest[slot], Max()) * unit, top[m][slot]);
          // While nothing is seen, any finite number does.
          highest[slot] = now == kNever ? 0.0f : now;
          shrink[slot] = power_of_two(top[m][slot] - highest[slot]);
          shrinks |= shrink[slot] != 1;
          top[m][slot] = now;
        }
        // The highest score of a row is most often among its first ones.
        if (any_lane(shrinks)) {
          ORTRAIN_UNROLL
          for (int slot = 0; slot < kRowSlots; ++slot) total[m][slot] *= shrink[slot];
          ORTRAIN_UNROLL
          for (int c = 0; c < kD / 16; ++c) {
            ORTRAIN_UNROLL
            for (int e = 0; e < Accumulator::kElements; ++e) {
              sums[m][c].set(e, sums[m][c][e] * shrink[Accumulator::row_slot(e)]);
            }
          }
        }
        ORTRAIN_UNROLL
        for (int n = 0; n < kN; ++n) {
          ORTRAIN_UNROLL
          for (int e = 0; e < Accumulator::kElements; ++e) {
            const int slot = Accumulator::row_slot(e);
            const float share = power_of_two(scores[m][n][e] * unit - highest[slot]);
            total[m][slot] += share;  // of this lane's elements
            scores[m][n].set(e, share);
          }
        }
        if (p.drops) {
          const FragmentDraws<false, kN> draws(dropout, elements, own_start + m * 16, key);
          ORTRAIN_UNROLL
          for (int n = 0; n < kN; ++n) {
            ORTRAIN_UNROLL
            for (int e = 0; e < Accumulator::kElements; ++e) {
              if (!draws.keeps(n, e)) scores[m][n].set(e, 0);
            }
          }
        }
      }
      add_weighted_rows<kM, kN, kD>(sums, scores, value_tile, value_dim);
    }
    if (Sizes::kStages == 1) {
      __syncthreads();
      if (following < seen) load_inner(0, following);
      end_copy_group();
    } else {
      stage = 1 - stage;
    }
    key = following;
    all_keys = all_following;
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
  float factor[kM][kRowSlots];
  ORTRAIN_UNROLL
  for (int m = 0; m < kM; ++m) {
    ORTRAIN_UNROLL
    for (int slot = 0; slot < kRowSlots; ++slot) {
      factor[m][slot] = total[m][slot] == 0 ? 0.0f : kept / total[m][slot];
    }
  }
  store_rows<kM, kD>(
      own_queries, sums, attention_row<T>(p.out, p.out_strides, b, h, span.first + own_start),
      p.out_strides.row, queries - own_start, value_dim, is_plain(kForm) || p.out_packs,
      [&](int m, int slot) { return factor[m][slot]; });
  if (p.logsumexp == nullptr || Accumulator::column_of(0) != 0) return;
  ORTRAIN_UNROLL
  for (int m = 0; m < kM; ++m) {
    ORTRAIN_UNROLL
    for (int slot = 0; slot < kRowSlots; ++slot) {
      const int i = own_start + m * 16 + Accumulator::row_of_slot(slot);
      if (i >= queries) continue;
      static_cast<float*>(p.logsumexp)[p.row(b, h, span.first + i)] =
          total[m][slot] == 0 ? std::numeric_limits<float>::infinity()
                              : top[m][slot] * kLn2 + logf(total[m][slot]);
    }
  }
}

template <class T, int kD, AttentionForm kForm>
void launch_forward_as(const AttentionProblem& p, void* stream) {
  using Sizes = ForwardSizes<kD>;
  const int64_t tiles = attention_tiles(p, p.queries, Sizes::kQueries);
  launch(forward_fragments<T, kD, kForm>,
         {.blocks = block_count(tiles * p.heads * p.batch),
          .threads = kFragmentThreads,
          .shared_bytes = Sizes::kSharedBytes},
         stream, p, tiles);
}

template <class T, int kD>
void launch_forward(const AttentionProblem& p, void* stream) {
  using enum AttentionForm;
  if constexpr (kD <= 128) {
    const AttentionForm form = form_of<kD>(p);
    if (form == plain) return launch_forward_as<T, kD, plain>(p, stream);
    if (form == masked_keys) return launch_forward_as<T, kD, masked_keys>(p, stream);
  }
  launch_forward_as<T, kD, general>(p, stream);
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
