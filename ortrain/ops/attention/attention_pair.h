// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/ops/attention/attention_tiles.h"

namespace ortrain::gpu {

// The operands of a tile of queries against a tile of keys in the backward, and what follows from
// them for each element. Queries are the rows of the threads' elements, or keys (kKeysAreRows).
template <class T, bool kKeysAreRows>
struct AttentionPair {
  using Tiles = AttentionTiles<T>;
  using C = typename Tiles::C;
  static constexpr int kEach = Tiles::kEach;

  const AttentionBackwardProblem& p;
  AttentionElements elements;
  const AttentionDropout& dropout;
  int64_t kv, query, key;  // first ones of the tiles
  int queries, keys;       // how many there are

  ORTRAIN_DEVICE AttentionRows<T> q() const {
    const AttentionProblem& f = p.forward;
    return {attention_row<T>(f.q, f.q_strides, elements.b, elements.h, elements.span.first + query),
            f.q_strides.row, queries, f.head_dim, f.q_packs};
  }
  ORTRAIN_DEVICE AttentionRows<T> dout() const {
    const AttentionProblem& f = p.forward;
    return {attention_row<T>(p.dout, f.out_strides, elements.b, elements.h,
                             elements.span.first + query),
            f.out_strides.row, queries, f.value_dim, p.dout_packs};
  }
  ORTRAIN_DEVICE AttentionRows<T> k() const {
    const AttentionProblem& f = p.forward;
    return {attention_row<T>(f.k, f.k_strides, elements.b, kv, elements.span.first + key),
            f.k_strides.row, keys, f.head_dim, f.k_packs};
  }
  ORTRAIN_DEVICE AttentionRows<T> v() const {
    const AttentionProblem& f = p.forward;
    return {attention_row<T>(f.v, f.v_strides, elements.b, kv, elements.span.first + key),
            f.v_strides.row, keys, f.value_dim, f.v_packs};
  }

  // Query and key of the thread's element r, c.
  ORTRAIN_DEVICE int64_t query_of(int r, int c) const {
    return query + (kKeysAreRows ? threadIdx.x % 16 * kEach + c : threadIdx.x / 16 * kEach + r);
  }
  ORTRAIN_DEVICE int64_t key_of(int r, int c) const {
    return key + (kKeysAreRows ? threadIdx.x / 16 * kEach + r : threadIdx.x % 16 * kEach + c);
  }
  ORTRAIN_DEVICE unsigned visible() const {
    return elements.visible<kEach>(query_of(0, 0), key_of(0, 0), kKeysAreRows ? 1 : kEach,
                                   kKeysAreRows ? kEach : 1);
  }

  // To `weights`: with p the probabilities and f the factors of dropout, p f; or
  // ds = p (f dout v^T - delta) if `of_scores`. All threads take part.
  ORTRAIN_DEVICE void compute(typename Tiles::Scores& weights, unsigned visible, bool of_scores,
                              C* a_panel, C* b_panel) {
    const AttentionProblem& f = p.forward;
    typename Tiles::Scores scores;
    if (kKeysAreRows) {
      Tiles::products(scores, k(), q(), a_panel, b_panel, false);
      if (of_scores) Tiles::products(weights, v(), dout(), a_panel, b_panel, false);
    } else {
      Tiles::products(scores, q(), k(), a_panel, b_panel, false);
      if (of_scores) Tiles::products(weights, dout(), v(), a_panel, b_panel, false);
    }
    const unsigned kept =
        f.drops ? dropout.kept<kEach>(elements, query_of(0, 0), key_of(0, 0),
                                      kKeysAreRows ? 1 : kEach, kKeysAreRows ? kEach : 1)
                : ~0u;
    const C factor = f.drops ? static_cast<C>(f.kept) : C{1};
    ORTRAIN_UNROLL
    for (int n = 0; n < kEach; ++n) {
      const int64_t i = kKeysAreRows ? query_of(0, n) : query_of(n, 0);
      const bool inside = i < elements.span.queries;
      const int64_t row = f.row(elements.b, elements.h, elements.span.first + (inside ? i : 0));
      const C logsumexp = inside ? static_cast<const C*>(f.logsumexp)[row] : C{0};
      const C delta = inside && of_scores ? static_cast<const C*>(p.delta)[row] : C{0};
      ORTRAIN_UNROLL
      for (int m = 0; m < kEach; ++m) {
        const int r = kKeysAreRows ? m : n;
        const int c = kKeysAreRows ? n : m;
        const unsigned bit = 1u << (r * kEach + c);
        C& weight = weights[r][c];
        if ((visible & bit) == 0) {
          weight = 0;
          continue;
        }
        const C score = scores[r][c] * static_cast<C>(f.scale) + elements.added<T>(i, key_of(r, c));
        const C share = exp(score - logsumexp);
        const C by = (kept & bit) != 0 ? factor : C{0};
        if (of_scores) {
          weight = share == 0 ? C{0} : share * (weight * by - delta);
        } else {
          weight = share * by;
        }
      }
    }
  }
};

}  // namespace ortrain::gpu
