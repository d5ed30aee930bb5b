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
  AttentionDropout<C>& dropout;
  int64_t kv, query, key;  // first ones of the tiles
  int queries, keys;       // how many there are

  ORTRAIN_DEVICE AttentionRows<T> q() const {
    const AttentionProblem& f = p.forward;
    return {attention_row<T>(f.q, f.q_strides, elements.b, elements.h, elements.span.first + query),
            f.q_strides.row, queries, f.head_dim, f.q_fours};
  }
  ORTRAIN_DEVICE AttentionRows<T> dout() const {
    const AttentionProblem& f = p.forward;
    return {attention_row<T>(p.dout, f.out_strides, elements.b, elements.h,
                             elements.span.first + query),
            f.out_strides.row, queries, f.value_dim, p.dout_fours};
  }
  ORTRAIN_DEVICE AttentionRows<T> k() const {
    const AttentionProblem& f = p.forward;
    return {attention_row<T>(f.k, f.k_strides, elements.b, kv, elements.span.first + key),
            f.k_strides.row, keys, f.head_dim, f.k_fours};
  }
  ORTRAIN_DEVICE AttentionRows<T> v() const {
    const AttentionProblem& f = p.forward;
    return {attention_row<T>(f.v, f.v_strides, elements.b, kv, elements.span.first + key),
            f.v_strides.row, keys, f.value_dim, f.v_fours};
  }

  // Query and key of the thread's element r, c.
  ORTRAIN_DEVICE int64_t query_of(int r, int c) const {
    return query + (kKeysAreRows ? threadIdx.x % 16 * kEach + c : threadIdx.x / 16 * kEach + r);
  }
  ORTRAIN_DEVICE int64_t key_of(int r, int c) const {
    return key + (kKeysAreRows ? threadIdx.x / 16 * kEach + r : threadIdx.x % 16 * kEach + c);
  }
  ORTRAIN_DEVICE unsigned visible() const {
    unsigned bits = 0;
ORTRAIN_UNROLL
    for (int r = 0; r < kEach; ++r) {
ORTRAIN_UNROLL
      for (int c = 0; c < kEach; ++c) {
        bits |= (elements.visible(query_of(r, c), key_of(r, c)) ? 1u : 0u) << (r * kEach + c);
      }
    }
    return bits;
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
    // Four keys in a row share a draw: keys go round in the inner loop.
ORTRAIN_UNROLL
    for (int outer = 0; outer < kEach; ++outer) {
      const int64_t i = kKeysAreRows ? query_of(0, outer) : query_of(outer, 0);
      const bool inside = i < elements.span.queries;
      const int64_t row = f.row(elements.b, elements.h, elements.span.first + (inside ? i : 0));
      const C logsumexp = inside ? static_cast<const C*>(f.logsumexp)[row] : C{0};
      const C delta = inside && of_scores ? static_cast<const C*>(p.delta)[row] : C{0};
ORTRAIN_UNROLL
      for (int inner = 0; inner < kEach; ++inner) {
        const int r = kKeysAreRows ? inner : outer;
        const int c = kKeysAreRows ? outer : inner;
        C& weight = weights[r][c];
        if (((visible >> (r * kEach + c)) & 1u) == 0) {
          weight = 0;
          continue;
        }
        const int64_t j = key_of(r, c);
        const C score = scores[r][c] * static_cast<C>(f.scale) + elements.added<T>(i, j);
        const C share = exp(score - logsumexp);
        const C factor = dropout.factor(elements.draw(i, j));
        if (of_scores) {
          weight = share == 0 ? C{0} : share * (weight * factor - delta);
        } else {
          weight = share * factor;
        }
      }
    }
  }
};

}  // namespace ortrain::gpu
