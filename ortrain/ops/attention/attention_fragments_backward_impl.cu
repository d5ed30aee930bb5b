// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/attention/attention_fragments.h"
#include "ortrain/ops/attention/attention_kernels.h"

namespace ortrain::gpu {
namespace {

// The outer tile, of keys (kOfKeys) or of queries, stays; tiles of the other side go by.
// Sizes: what was fastest on an H200 of those that fit its registers.
template <int kD, bool kOfKeys>
struct BackwardSizes {
  static constexpr int kM = 1;
#if defined(__HIPCC__)
  static constexpr int kInner = 32;
  static constexpr int kStages = 1;  // 64 KiB hold all of it
  static constexpr int kBlocks = 1;
#else
  static constexpr int kInner = kD > 64 || kOfKeys ? 32 : 64;
  static constexpr int kBlocks = kD > 128 ? 1 : kD > 64 && kOfKeys ? 2 : 3;  // on a multiprocessor
  static constexpr int kStages = kD > 128 ? 1 : 2;  // the next tiles are copied meanwhile
#endif
  static constexpr int kOuter = kFragmentWarps * 16 * kM;
  static constexpr size_t kSharedBytes =
      (kOuter + kStages * kInner) * 2 * kFragmentStride<kD> * size_t{2} +
      (kOfKeys ? kStages * 2 * kInner * sizeof(float) : 0);
};

// Writes scores of a head's [queries, keys] that begin with these.
template <class T, int kM, int kN>
ORTRAIN_DEVICE void store_scores(T* to, const Accumulator (&scores)[kM][kN], int query, int key,
                                 int queries, int keys) {
  ORTRAIN_UNROLL
  for (int m = 0; m < kM; ++m) {
    ORTRAIN_UNROLL
    for (int n = 0; n < kN; ++n) {
      ORTRAIN_UNROLL
      for (int e = 0; e < Accumulator::kElements; ++e) {
        const int i = query + m * 16 + Accumulator::row_of(e);
        const int j = key + n * 16 + Accumulator::column_of(e);
        if (i < queries && j < keys) to[int64_t{i} * keys + j] = static_cast<T>(scores[m][n][e]);
      }
    }
  }
}

// A block owns a tile of keys and their gradients, dk (kFirst) and dv (kSecond), or a tile of
// queries and dq (kFirst). Probabilities are recomputed for both, so that every sum has one owner
// and one order. With x the outer and y the inner operands, (k, v) and (q, dout) or (q, dout) and
// (k, v): scores = x1 y1^T, dp = x2 y2^T, first = ds y1, second = p y2.
template <class T, int kD, AttentionForm kForm, bool kOfKeys, bool kFirst, bool kSecond>
__global__ void __launch_bounds__(kFragmentThreads, (BackwardSizes<kD, kOfKeys>::kBlocks))
    backward_fragments(AttentionBackwardProblem p, int64_t tiles) {
  using Sizes = BackwardSizes<kD, kOfKeys>;
  constexpr int kM = Sizes::kM;
  constexpr int kInner = Sizes::kInner;
  constexpr int kN = kInner / 16;
  constexpr int kStages = Sizes::kStages;
  constexpr int kStride = kFragmentStride<kD>;
  constexpr int kRowSlots = Accumulator::kRows;
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
  int64_t tile_start;
  const AttentionSpan span = fragment_span<kForm>(f, tile, Sizes::kOuter, tile_start);
  if (tile_start >= (kOfKeys ? span.keys : span.queries)) return;
  const int start = static_cast<int>(tile_start);
  const int head_dim = is_plain(kForm) ? kD : f.head_dim,
            value_dim = is_plain(kForm) ? kD : f.value_dim;
  const int query_end = static_cast<int>(span.queries), key_end = static_cast<int>(span.keys);

  T* const outer = dynamic_shared<T>();
  T* const inner = outer + 2 * Sizes::kOuter * kStride;
  auto* const row_values = reinterpret_cast<float*>(inner + kStages * 2 * kInner * kStride);
  using Rows = FragmentRows<T, kD, kForm>;
  const auto queries = [&](int64_t h) {
    return Rows(attention_row<T>(f.q, f.q_strides, b, h, span.first), f.q_strides.row, query_end,
                f.head_dim, f.q_packs);
  };
  const auto douts = [&](int64_t h) {
    return Rows(attention_row<T>(p.dout, f.out_strides, b, h, span.first), f.out_strides.row,
                query_end, f.value_dim, p.dout_packs);
  };
  const Rows keys(attention_row<T>(f.k, f.k_strides, b, kv, span.first), f.k_strides.row, key_end,
                  f.head_dim, f.k_packs);
  const Rows values(attention_row<T>(f.v, f.v_strides, b, kv, span.first), f.v_strides.row, key_end,
                    f.value_dim, f.v_packs);
  // Logsumexp and delta of the queries of a head.
  const auto row_value = [&](const void* data, int64_t h) {
    return static_cast<const float*>(data) + f.row(b, h, span.first);
  };
  const auto load_inner = [&](int stage, int64_t h, int other) {
    T* const to = inner + stage * 2 * kInner * kStride;
    if constexpr (kOfKeys) {
      queries(h).template load<kInner>(to, other);
      douts(h).template load<kInner>(to + kInner * kStride, other);
      static_assert(2 * kInner <= kFragmentThreads);
      if (threadIdx.x < 2 * kInner) {
        const int i = other + static_cast<int>(threadIdx.x) % kInner;
        copy_float(row_values + stage * 2 * kInner + threadIdx.x,
                   row_value(threadIdx.x < kInner ? f.logsumexp : p.delta, h) + i, i < query_end);
      }
    } else {
      keys.template load<kInner>(to, other);
      values.template load<kInner>(to + kInner * kStride, other);
    }
  };

  // The other side's rows that have to do with this tile's.
  int from = 0, to = kOfKeys ? query_end : key_end;
  if (f.causal && kOfKeys) from = start;
  if (f.causal && !kOfKeys && start + Sizes::kOuter < to) to = start + Sizes::kOuter;
  int64_t h = first_head;
  bool all_keys = false;  // of the next tile are seen; of the warp's own, where they stay
  if constexpr (kOfKeys) {
    const AttentionElements elements{f, b, h, span};
    const bool sees =
        next_visible_tile<Sizes::kOuter, kForm>(elements, start, start + 1, all_keys) <= start;
    if (f.mask.head == 0 && !sees) to = from;
    if constexpr (kForm == AttentionForm::masked_keys) {
      const int own = start + warp() * kM * 16;
      all_keys = seen_keys<kM * 16>(elements, own) == (KeyBits{1} << (kM * 16)) - 1;
    }
  } else {
    from = next_visible_tile<kInner, kForm>({f, b, h, span}, 0, to, all_keys);
  }
  if (from >= to) h = end_head;
  int other = from;
  const auto go_on = [&] {
    other += kInner;
    if (!kOfKeys) other = next_visible_tile<kInner, kForm>({f, b, h, span}, other, to, all_keys);
    if (other < to) return;
    other = from;
    ++h;
  };

  if constexpr (kOfKeys) {
    keys.template load<Sizes::kOuter>(outer, start);
    values.template load<Sizes::kOuter>(outer + Sizes::kOuter * kStride, start);
  } else {
    queries(first_head).template load<Sizes::kOuter>(outer, start);
    douts(first_head).template load<Sizes::kOuter>(outer + Sizes::kOuter * kStride, start);
  }
  if (h < end_head) load_inner(0, h, other);
  end_copy_group();

  const AttentionDropout dropout(f);
  const float scale = static_cast<float>(f.scale) * kLog2E;
  const float factor = f.drops ? static_cast<float>(f.kept) : 1.0f;
  const int own_start = start + warp() * kM * 16;
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
      const int i = own_start + m * 16 + Accumulator::row_of_slot(slot);
      const bool is_there = !kOfKeys && i < query_end;
      own_logsumexp[m][slot] = is_there ? row_value(f.logsumexp, first_head)[i] * kLog2E : 0;
      own_delta[m][slot] = is_there ? row_value(p.delta, first_head)[i] : 0;
    }
  }

  int stage = 0;
  while (h < end_head) {
    const int64_t now_h = h;
    const int now = other;
    const bool all_now = all_keys;
    go_on();
    wait_for_copies<0>();
    __syncthreads();  // this stage is there, and everyone is done with the other one
    if (kStages == 2) {
      if (h < end_head) load_inner(1 - stage, h, other);
      end_copy_group();
    }
    const T* const inner1 = inner + stage * 2 * kInner * kStride;
    const T* const inner2 = inner1 + kInner * kStride;
    const float* const inner_values = row_values + stage * 2 * kInner;
    // What is above the diagonal has nothing to do.
    const bool idle =
        f.causal && (kOfKeys ? own_start >= now + kInner : now >= own_start + kM * 16);
    if (!idle) {
      const AttentionElements elements{f, b, now_h, span};
      const int query = kOfKeys ? now : own_start;
      const int key = kOfKeys ? own_start : now;
      Accumulator scores[kM][kN], ds[kM][kN];
      multiply_rows<kM, kN, kD>(scores, own1, inner1, head_dim);
      if constexpr (kFirst) multiply_rows<kM, kN, kD>(ds, own2, inner2, value_dim);
      const float unit = FragmentMask<T, kForm>(elements, query, key, kOfKeys ? kInner : kM * 16,
                                                kOfKeys ? kM * 16 : kInner, all_now)
                             .template apply<kOfKeys>(scores, scale);
      ORTRAIN_UNROLL
      for (int m = 0; m < kM; ++m) {
        FragmentDraws<kOfKeys, kN> draws;
        if (f.drops) {
          draws = {dropout, elements, query + (kOfKeys ? 0 : 16 * m), key + (kOfKeys ? 16 * m : 0)};
        }
        ORTRAIN_UNROLL
        for (int n = 0; n < kN; ++n) {
          ORTRAIN_UNROLL
          for (int e = 0; e < Accumulator::kElements; ++e) {
            const int slot = Accumulator::row_slot(e);
            const int column = n * 16 + Accumulator::column_of(e);
            const float base = kOfKeys ? inner_values[column] * kLog2E : own_logsumexp[m][slot];
            const float share = power_of_two(scores[m][n][e] * unit - base);
            const float by = draws.keeps(n, e) ? factor : 0.0f;
            if constexpr (kFirst) {
              const float delta = kOfKeys ? inner_values[kInner + column] : own_delta[m][slot];
              ds[m][n].set(e, share == 0 ? 0.0f : share * (ds[m][n][e] * by - delta));
            }
            if constexpr (kSecond) scores[m][n].set(e, share * by);
          }
        }
      }
      if constexpr (kForm == AttentionForm::general && !kOfKeys) {
        if (p.dmask != nullptr) {
          T* const scores_of_head = static_cast<T*>(p.dmask) + f.row(b, now_h, 0) * f.keys;
          store_scores(scores_of_head, ds, query, key, query_end, key_end);
        }
      }
      if constexpr (kFirst) add_weighted_rows<kM, kN, kD>(first, ds, inner1, head_dim);
      if constexpr (kSecond) add_weighted_rows<kM, kN, kD>(second, scores, inner2, value_dim);
    }
    if (kStages == 1) {
      __syncthreads();
      if (h < end_head) load_inner(0, h, other);
      end_copy_group();
    } else {
      stage = 1 - stage;
    }
  }

  wait_for_copies<0>();
  __syncthreads();  // the outer tiles become the staging place of results
  const int left = (kOfKeys ? key_end : query_end) - own_start;
  const auto scaled = [&](int, int) { return static_cast<float>(f.scale); };
  const auto as_is = [](int, int) { return 1.0f; };
  if constexpr (!kOfKeys) {
    store_rows<kM, kD>(own1, first,
                       attention_row<T>(p.dq, f.q_strides, b, owner, span.first + own_start),
                       f.q_strides.row, left, head_dim, is_plain(kForm) || p.dq_packs, scaled);
  } else {
    if (kFirst && p.dk != nullptr) {
      store_rows<kM, kD>(own1, first,
                         attention_row<T>(p.dk, f.k_strides, b, owner, span.first + own_start),
                         f.k_strides.row, left, head_dim, is_plain(kForm) || p.dk_packs, scaled);
    }
    if (kSecond && p.dv != nullptr) {
      store_rows<kM, kD>(own2, second,
                         attention_row<T>(p.dv, f.v_strides, b, owner, span.first + own_start),
                         f.v_strides.row, left, value_dim, is_plain(kForm) || p.dv_packs, as_is);
    }
  }
}

template <class T, int kD, AttentionForm kForm, bool kOfKeys, bool kFirst, bool kSecond>
void launch_backward(const AttentionBackwardProblem& p, void* stream) {
  using Sizes = BackwardSizes<kD, kOfKeys>;
  const AttentionProblem& f = p.forward;
  const int64_t tiles = attention_tiles(f, kOfKeys ? f.keys : f.queries, Sizes::kOuter);
  launch(backward_fragments<T, kD, kForm, kOfKeys, kFirst, kSecond>,
         {.blocks = block_count(tiles * (kOfKeys ? f.kv_heads : f.heads) * f.batch),
          .threads = kFragmentThreads,
          .shared_bytes = Sizes::kSharedBytes},
         stream, p, tiles);
}

template <class T, int kD, AttentionForm kForm>
void launch_both_as(const AttentionBackwardProblem& p, void* stream) {
  if (p.dq != nullptr) launch_backward<T, kD, kForm, false, true, false>(p, stream);
  if constexpr (kD <= 128) {
    if (p.dk != nullptr || p.dv != nullptr) {
      launch_backward<T, kD, kForm, true, true, true>(p, stream);
    }
  } else {  // registers hold the sums of one of them
    if (p.dk != nullptr) launch_backward<T, kD, kForm, true, true, false>(p, stream);
    if (p.dv != nullptr) launch_backward<T, kD, kForm, true, false, true>(p, stream);
  }
}

template <class T, int kD>
void launch_both(const AttentionBackwardProblem& p, void* stream) {
  using enum AttentionForm;
  if constexpr (kD <= 128) {
    const auto packs = [](const void* data, bool packed) { return data == nullptr || packed; };
    if (p.dout_packs && packs(p.dq, p.dq_packs) && packs(p.dk, p.dk_packs) &&
        packs(p.dv, p.dv_packs)) {
      const AttentionForm form = form_of<kD>(p.forward);
      if (form == plain) return launch_both_as<T, kD, plain>(p, stream);
      if (form == masked_keys) return launch_both_as<T, kD, masked_keys>(p, stream);
    }
  }
  launch_both_as<T, kD, general>(p, stream);
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
