// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/attention/attention_fragments.h"
#include "ortrain/ops/attention/attention_kernels.h"

namespace ortrain::gpu {
namespace {

// The outer tile, of keys (kOfKeys) or of queries, stays; tiles of the other side go by.
template <int kD, bool kOfKeys>
struct BackwardSizes {
  static constexpr int kM = kD == 64 && !kOfKeys ? 2 : 1;
  static constexpr int kInner = kD == 64 && kOfKeys ? 64 : 32;
#if defined(__HIPCC__)
  static constexpr int kStages = 1;  // 64 KiB hold all of it
#else
  static constexpr int kStages = kD > 128 ? 1 : 2;  // the next tiles are copied meanwhile
#endif
  static constexpr int kOuter = kFragmentWarps * 16 * kM;
  static constexpr size_t kSharedBytes =
      (kOuter + kStages * kInner) * 2 * kFragmentStride<kD> * size_t{2} +
      (kOfKeys ? kStages * 2 * kInner * sizeof(float) : 0);
};

// A block owns a tile of keys and their gradients, dk (kFirst) and dv (kSecond), or a tile of
// queries and dq (kFirst). Probabilities are recomputed for both, so that every sum has one owner
// and one order. With x the outer and y the inner operands, (k, v) and (q, dout) or (q, dout) and
// (k, v): scores = x1 y1^T, dp = x2 y2^T, first = ds y1, second = p y2.
template <class T, int kD, bool kOfKeys, bool kFirst, bool kSecond>
__global__ void __launch_bounds__(kFragmentThreads)
    backward_fragments(AttentionBackwardProblem p, int64_t tiles) {
  using Sizes = BackwardSizes<kD, kOfKeys>;
  constexpr int kM = Sizes::kM;
  constexpr int kInner = Sizes::kInner;
  constexpr int kN = kInner / 16;
  constexpr int kStages = Sizes::kStages;
  constexpr int kStride = kFragmentStride<kD>;
  constexpr int kRowSlots = Accumulator::kRows;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const AttentionProblem& f = p.forward;

  int64_t task = blockIdx.x;
  // Under a causal mask the last queries and the first keys have the most to do: they begin first.
  const int64_t tile = kOfKeys ? task % tiles : tiles - 1 - task % tiles;
  task /= tiles;
  const int64_t owners = kOfKeys ? f.kv_heads : f.heads;
  const int64_t owner = task % owners;
  const int64_t b = task / owners;
  const int64_t kv = kOfKeys ? owner : owner / f.group();
  const int64_t first_head = kOfKeys ? owner * f.group() : owner;
  const int64_t end_head = kOfKeys ? first_head + f.group() : first_head + 1;
  int64_t start;
  const AttentionSpan span = span_of_tile(f, tile, Sizes::kOuter, start);
  const int64_t outer_end = kOfKeys ? span.keys : span.queries;
  if (start >= outer_end) return;

  T* const outer = dynamic_shared<T>();
  T* const inner = outer + 2 * Sizes::kOuter * kStride;
  auto* const row_values = reinterpret_cast<float*>(inner + kStages * 2 * kInner * kStride);
  const auto queries = [&](int64_t h, int64_t i) -> FragmentRows<T> {
    return {attention_row<T>(f.q, f.q_strides, b, h, span.first + i), f.q_strides.row,
            span.queries - i, f.head_dim, f.q_packs};
  };
  const auto douts = [&](int64_t h, int64_t i) -> FragmentRows<T> {
    return {attention_row<T>(p.dout, f.out_strides, b, h, span.first + i), f.out_strides.row,
            span.queries - i, f.value_dim, p.dout_packs};
  };
  const auto keys = [&](int64_t j) -> FragmentRows<T> {
    return {attention_row<T>(f.k, f.k_strides, b, kv, span.first + j), f.k_strides.row,
            span.keys - j, f.head_dim, f.k_packs};
  };
  const auto values = [&](int64_t j) -> FragmentRows<T> {
    return {attention_row<T>(f.v, f.v_strides, b, kv, span.first + j), f.v_strides.row,
            span.keys - j, f.value_dim, f.v_packs};
  };
  // Of query i: logsumexp of base 2, and delta. A query behind the end has shares of 0.
  const auto logsumexp_of = [&](int64_t h, int64_t i) {
    return i < span.queries
               ? static_cast<const float*>(f.logsumexp)[f.row(b, h, span.first + i)] * kLog2E
               : kInfinity;
  };
  const auto delta_of = [&](int64_t h, int64_t i) {
    return i < span.queries ? static_cast<const float*>(p.delta)[f.row(b, h, span.first + i)]
                            : 0.0f;
  };
  const auto load_inner = [&](int stage, int64_t h, int64_t other) {
    T* const to = inner + stage * 2 * kInner * kStride;
    if constexpr (kOfKeys) {
      load_rows<kInner, kD>(to, queries(h, other));
      load_rows<kInner, kD>(to + kInner * kStride, douts(h, other));
      float* const row_value = row_values + stage * 2 * kInner;
      for (int i = threadIdx.x; i < kInner; i += kFragmentThreads) {
        row_value[i] = logsumexp_of(h, other + i);
        row_value[kInner + i] = delta_of(h, other + i);
      }
    } else {
      load_rows<kInner, kD>(to, keys(other));
      load_rows<kInner, kD>(to + kInner * kStride, values(other));
    }
  };

  // The other side's rows that have to do with this tile's.
  int64_t from = 0, to = kOfKeys ? span.queries : span.keys;
  if (f.causal && kOfKeys) from = start;
  if (f.causal && !kOfKeys && start + Sizes::kOuter < to) to = start + Sizes::kOuter;
  int64_t h = first_head;
  if constexpr (kOfKeys) {
    const AttentionElements elements{f, b, h, span};
    if (f.mask.head == 0 && next_visible_tile<Sizes::kOuter>(elements, start, start + 1) > start) {
      to = from;
    }
  } else {
    from = next_visible_tile<kInner>({f, b, h, span}, 0, to);
  }
  if (from >= to) h = end_head;
  int64_t other = from;
  const auto go_on = [&] {
    other += kInner;
    if (!kOfKeys) other = next_visible_tile<kInner>({f, b, h, span}, other, to);
    if (other < to) return;
    other = from;
    ++h;
  };

  if constexpr (kOfKeys) {
    load_rows<Sizes::kOuter, kD>(outer, keys(start));
    load_rows<Sizes::kOuter, kD>(outer + Sizes::kOuter * kStride, values(start));
  } else {
    load_rows<Sizes::kOuter, kD>(outer, queries(first_head, start));
    load_rows<Sizes::kOuter, kD>(outer + Sizes::kOuter * kStride, douts(first_head, start));
  }
  if (h < end_head) load_inner(0, h, other);
  end_copy_group();

  const AttentionDropout dropout(f);
  const float scale = static_cast<float>(f.scale) * kLog2E;
  const float factor = f.drops ? static_cast<float>(f.kept) : 1.0f;
  const int64_t own_start = start + warp() * kM * 16;
  T* const own1 = outer + warp() * kM * 16 * kStride;
  T* const own2 = own1 + Sizes::kOuter * kStride;
  Accumulator first[kM][kD / 16], second[kM][kD / 16];
  float own_logsumexp[kM][kRowSlots], own_delta[kM][kRowSlots];
  ORTRAIN_UNROLL
  for (int m = 0; m < kM; ++m) {
    ORTRAIN_UNROLL
    for (int c = 0; c < kD / 16; ++c) {
      first[m][c].fill(0);
      second[m][c].fill(0);
    }
    ORTRAIN_UNROLL
    for (int slot = 0; slot < kRowSlots; ++slot) {
      const int64_t i = own_start + m * 16 + Accumulator::row_of_slot(slot);
      own_logsumexp[m][slot] = kOfKeys ? 0 : logsumexp_of(first_head, i);
      own_delta[m][slot] = kOfKeys ? 0 : delta_of(first_head, i);
    }
  }

  int stage = 0;
  while (h < end_head) {
    const int64_t now_h = h, now = other;
    go_on();
    if (kStages == 2) {
      if (h < end_head) load_inner(1 - stage, h, other);
      end_copy_group();
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    const T* const inner1 = inner + stage * 2 * kInner * kStride;
    const T* const inner2 = inner1 + kInner * kStride;
    const float* const row_value = row_values + stage * 2 * kInner;
    // What is above the diagonal has nothing to do.
    const bool idle =
        f.causal && (kOfKeys ? own_start >= now + kInner : now >= own_start + kM * 16);
    if (!idle) {
      const AttentionElements elements{f, b, now_h, span};
      const int64_t query = kOfKeys ? now : own_start;
      const int64_t key = kOfKeys ? own_start : now;
      Accumulator scores[kM][kN], ds[kM][kN];
      multiply_rows<kM, kN, kD>(scores, own1, inner1, f.head_dim);
      if constexpr (kFirst) multiply_rows<kM, kN, kD>(ds, own2, inner2, f.value_dim);
      const FragmentMask<T> mask(elements, query, key, kOfKeys ? kInner : kM * 16,
                                 kOfKeys ? kM * 16 : kInner);
      ORTRAIN_UNROLL
      for (int m = 0; m < kM; ++m) {
        ORTRAIN_UNROLL
        for (int n = 0; n < kN; ++n) {
          unsigned kept = ~0u;
          if (f.drops) {
            const FragmentDropout draws(dropout, elements, query + 16 * (kOfKeys ? n : m),
                                        key + 16 * (kOfKeys ? m : n));
            ORTRAIN_UNROLL
            for (int e = 0; e < Accumulator::kElements; ++e) {
              if (!draws.template keeps<kOfKeys>(e)) kept &= ~(1u << e);
            }
          }
          ORTRAIN_UNROLL
          for (int e = 0; e < Accumulator::kElements; ++e) {
            const int slot = Accumulator::row_slot(e);
            const int row = m * 16 + Accumulator::row_of(e);
            const int column = n * 16 + Accumulator::column_of(e);
            float score = scores[m][n][e] * scale;
            if (mask.hides()) {
              score = mask.apply(score, kOfKeys ? column : row, kOfKeys ? row : column);
            }
            const float share =
                exp2f(score - (kOfKeys ? row_value[column] : own_logsumexp[m][slot]));
            const float by = (kept >> e) & 1u ? factor : 0.0f;
            if constexpr (kFirst) {
              const float delta = kOfKeys ? row_value[kInner + column] : own_delta[m][slot];
              ds[m][n].set(e, share == 0 ? 0.0f : share * (ds[m][n][e] * by - delta));
            }
            if constexpr (kSecond) scores[m][n].set(e, share * by);
          }
        }
      }
      if constexpr (kFirst) add_weighted_rows<kM, kN, kD>(first, ds, inner1, f.head_dim);
      if constexpr (kSecond) add_weighted_rows<kM, kN, kD>(second, scores, inner2, f.value_dim);
    }
    __syncthreads();
    if (kStages == 1) {
      if (h < end_head) load_inner(0, h, other);
      end_copy_group();
    } else {
      stage = 1 - stage;
    }
  }

  wait_for_copies<0>();
  __syncthreads();  // the outer tiles become the staging place of results
  const int64_t left = outer_end - own_start;
  const auto scaled = [&](int, int) { return static_cast<float>(f.scale); };
  const auto as_is = [](int, int) { return 1.0f; };
  if constexpr (!kOfKeys) {
    store_rows<kM, kD>(own1, first,
                       attention_row<T>(p.dq, f.q_strides, b, owner, span.first + own_start),
                       f.q_strides.row, left, f.head_dim, p.dq_packs, scaled);
  } else {
    if (kFirst && p.dk != nullptr) {
      store_rows<kM, kD>(own1, first,
                         attention_row<T>(p.dk, f.k_strides, b, owner, span.first + own_start),
                         f.k_strides.row, left, f.head_dim, p.dk_packs, scaled);
    }
    if (kSecond && p.dv != nullptr) {
      store_rows<kM, kD>(own2, second,
                         attention_row<T>(p.dv, f.v_strides, b, owner, span.first + own_start),
                         f.v_strides.row, left, f.value_dim, p.dv_packs, as_is);
    }
  }
}

template <class T, int kD, bool kOfKeys, bool kFirst, bool kSecond>
void launch_backward(const AttentionBackwardProblem& p, void* stream) {
  using Sizes = BackwardSizes<kD, kOfKeys>;
  const AttentionProblem& f = p.forward;
  const int64_t tiles = attention_tiles(f, kOfKeys ? f.keys : f.queries, Sizes::kOuter);
  launch(backward_fragments<T, kD, kOfKeys, kFirst, kSecond>,
         {.blocks = block_count(tiles * (kOfKeys ? f.kv_heads : f.heads) * f.batch),
          .threads = kFragmentThreads,
          .shared_bytes = Sizes::kSharedBytes},
         stream, p, tiles);
}

template <class T, int kD>
void launch_both(const AttentionBackwardProblem& p, void* stream) {
  if (p.dq != nullptr) launch_backward<T, kD, false, true, false>(p, stream);
  if constexpr (kD <= 128) {
    if (p.dk != nullptr || p.dv != nullptr) {
      launch_backward<T, kD, true, true, true>(p, stream);
    }
  } else {  // registers hold the sums of one of them
    if (p.dk != nullptr) launch_backward<T, kD, true, true, false>(p, stream);
    if (p.dv != nullptr) launch_backward<T, kD, true, false, true>(p, stream);
  }
}

template <class T>
void launch_of(const AttentionBackwardProblem& p, void* stream) {
  const int width = std::max(p.forward.head_dim, p.forward.value_dim);
  if (width <= 64) {
    launch_both<T, 64>(p, stream);
  } else if (width <= 128) {
    launch_both<T, 128>(p, stream);
  } else {
#if !defined(__HIPCC__)  // more shared memory than there is
    launch_both<T, 256>(p, stream);
#endif
  }
}

}  // namespace

void attention_backward_fragments(DType type, const AttentionBackwardProblem& p, void* stream) {
  if (type == DType::f16) {
    launch_of<Float16>(p, stream);
  } else {
    launch_of<BFloat16>(p, stream);
  }
}

}  // namespace ortrain::gpu
