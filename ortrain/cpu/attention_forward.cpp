// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "ortrain/cpu/attention_blocks.h"
#include "ortrain/cpu/simd/attention_rows.h"
#include "ortrain/cpu/simd/row_ops.h"

namespace ortrain::cpu {
namespace {

using namespace attention_blocks;

// Query blocks [first, last) of one head.
void forward_blocks(const AttentionForward& a, const Blocking& size, int64_t b, int64_t h,
                    int64_t first, int64_t last) {
  const AttentionShape& s = a.shape;
  const GemmKernels<float> gemm = gemm_kernels_f32();
  const RowOps<float> ops = row_ops<float>();
  const AttentionRows rows_ops = attention_rows();
  const int64_t kv = h / (s.heads / s.kv_heads);
  const int64_t bq = size.block_queries;
  const int64_t keys = visible_keys(a, std::min(s.queries, last * bq));

  Carver carver;
  float *k_panels, *v_rows, *q_panels, *scores, *sums, *max, *total, *mask_row, *factor_row;
  for (int pass = 0; pass < 2; ++pass) {
    if (pass == 1) carver.allocate();
    k_panels = carver.take(round_up(keys, size.panel_cols) * s.head_dim);
    v_rows = carver.take(keys * size.value_pad);
    q_panels = carver.take(bq * s.head_dim);
    scores = carver.take(bq * kScoreStride);
    sums = carver.take(bq * size.value_pad);
    max = carver.take(bq);
    total = carver.take(bq);
    mask_row = carver.take(kBlockKeys);
    factor_row = carver.take(kBlockKeys);
  }
  pack_rows(gemm, a.k, a.storage, a.k_strides, b, kv, 0, keys, s.head_dim, size.panel_cols,
            k_panels);
  load_rows(a.v, a.storage, a.v_strides, b, kv, 0, keys, s.value_dim, v_rows, size.value_pad);
  const DropoutRows dropout(a, factor_row);

  for (int64_t block = first; block < last; ++block) {
    const int64_t i0 = block * bq;
    const int64_t rows = std::min(bq, s.queries - i0);
    pack_rows(gemm, a.q, a.storage, a.q_strides, b, h, i0, rows, s.head_dim, size.panel_rows,
              q_panels);
    std::fill(max, max + rows, -kInfinity);
    std::fill(total, total + rows, 0.0f);
    std::fill(sums, sums + rows * size.value_pad, 0.0f);
    MaskRows mask(a, mask_row);

    const int64_t block_keys = visible_keys(a, i0 + rows);
    for (int64_t j0 = 0; j0 < block_keys; j0 += kBlockKeys) {
      const int64_t cols = std::min(kBlockKeys, block_keys - j0);
      GemmBlock product;
      product.rows = rows;
      product.cols = round_up(cols, size.panel_cols);
      product.depth = s.head_dim;
      product.alpha = static_cast<float>(a.options.scale);
      product.accumulate = false;
      product.a_layout = GemmBlock::A::kPanels;
      product.a = q_panels;
      product.a_stride = 0;
      product.b = k_panels + j0 * s.head_dim;
      product.b_panel = size.panel_cols * s.head_dim;
      product.b_stride = size.panel_cols;
      product.c = scores;
      product.ldc = kScoreStride;
      gemm_block(product);

      for (int64_t r = 0; r < rows; ++r) {
        const int64_t i = i0 + r;
        float* p = scores + r * kScoreStride;
        const int64_t seen = a.options.causal ? std::clamp<int64_t>(i + 1 - j0, 0, cols) : cols;
        std::fill(p + seen, p + cols, 0.0f);
        if (seen == 0) continue;
        const float block_max = rows_ops.mask_max(p, mask.row(b, h, i, j0, seen), seen);
        // NaN scores must reach the sum, and a row without any key so far has nothing to add.
        if (block_max == -kInfinity && ops.sum(p, seen) == -kInfinity) {
          std::fill(p, p + seen, 0.0f);
          continue;
        }
        const float new_max = std::max(max[r], block_max);
        if (max[r] != new_max) {
          const float shrink = std::exp(max[r] - new_max);
          if (max[r] != -kInfinity) ops.scale(shrink, sums + r * size.value_pad, size.value_pad);
          total[r] *= shrink;
          max[r] = new_max;
        }
        total[r] += ops.exp_shifted(new_max, p, p, seen);
        if (dropout.active()) {
          ops.multiply(dropout.row(a.rows.of(b, h, i), j0, seen), p, seen);
        }
      }

      product.cols = size.value_pad;
      product.depth = cols;
      product.alpha = 1.0f;
      product.accumulate = true;
      product.a_layout = GemmBlock::A::kRows;
      product.a = scores;
      product.b = v_rows + j0 * size.value_pad;
      product.b_panel = size.panel_cols;
      product.b_stride = size.value_pad;
      product.c = sums;
      product.ldc = size.value_pad;
      gemm_block(product);
    }

    float* lse = static_cast<float*>(a.logsumexp);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = i0 + r;
      float* sum = sums + r * size.value_pad;
      const bool dead = total[r] == 0.0f;
      ops.scale(dead ? 0.0f : 1.0f / total[r], sum, s.value_dim);
      store_row(sum, a.storage, s.value_dim, a.out, offset(a.out_strides, b, h, i));
      if (lse != nullptr) {
        lse[a.rows.of(b, h, i)] = dead ? kInfinity : max[r] + std::log(total[r]);
      }
    }
  }
}

}  // namespace

void attention_blocked(const AttentionForward& a) {
  const AttentionShape& s = a.shape;
  if (s.batch * s.heads * s.queries == 0) return;
  const Blocking size(s, gemm_kernels_f32());
  // A task packs the keys it needs, so heads are cut only where there are few of them.
  const int64_t heads = s.batch * s.heads;
  const int64_t wanted = thread_count() > 1 ? ceil_div(4 * thread_count(), heads) : 1;
  const int64_t cuts = std::clamp<int64_t>(wanted, 1, size.query_blocks);
  const int64_t step = ceil_div(size.query_blocks, cuts);
  const int64_t tasks = ceil_div(size.query_blocks, step);
  for_each_task(s, heads * tasks, [&](int64_t task) {
    const int64_t head = task / tasks;
    // The last query blocks see the most keys under a causal mask: hand them out first.
    const int64_t first = (tasks - 1 - task % tasks) * step;
    forward_blocks(a, size, head / s.heads, head % s.heads, first,
                   std::min(size.query_blocks, first + step));
  });
}

void attention_blocked(const AttentionForward& a, const AttentionSequences& sequences) {
  const int64_t heads = a.shape.heads;
  for_each_task(a.shape, sequences.count * heads, [&](int64_t task) {
    const AttentionForward one = sequence_of(a, sequences, task / heads);
    if (one.shape.queries == 0) return;
    const Blocking size(one.shape, gemm_kernels_f32());
    forward_blocks(one, size, 0, task % heads, 0, size.query_blocks);
  });
  fill_rest(a, sequences);
}

}  // namespace ortrain::cpu
