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

// How the work is cut. Everything here depends on the shape alone, so the results do too.
struct BackwardPlan {
  // Units (batch, kv head) whose mask gradients overlap form one group and run one after the other.
  bool mask_per_batch, mask_per_head;
  int64_t groups, chunks, chunk_keys;

  // The keys of one of many sequences are never cut.
  explicit BackwardPlan(const AttentionShape& s)
      : mask_per_batch(true),
        mask_per_head(true),
        groups(s.batch * s.kv_heads),
        chunks(1),
        chunk_keys(s.keys) {}

  BackwardPlan(const AttentionShape& s, const AttentionMask& mask, bool wants_dmask) {
    mask_per_batch = !wants_dmask || mask.batch != 0 || s.batch <= 1;
    mask_per_head = !wants_dmask || mask.head != 0 || s.heads <= 1;
    groups = (mask_per_batch ? s.batch : 1) * (mask_per_head ? s.kv_heads : 1);
    // Few groups: the keys are cut as well, and the parts of dq are summed at the end.
    constexpr int64_t kTasks = 64;
    constexpr int64_t kLeastKeys = 128;
    const bool keys_apart = !wants_dmask || mask.col != 0 || s.keys <= 1;
    chunks = keys_apart ? std::clamp<int64_t>(ceil_div(kTasks, std::max<int64_t>(groups, 1)), 1,
                                              std::max<int64_t>(1, s.keys / kLeastKeys))
                        : 1;
    chunk_keys = std::max<int64_t>(64, round_up(ceil_div(s.keys, chunks), 64));
    chunks = std::max<int64_t>(1, ceil_div(s.keys, chunk_keys));
  }
};

class BackwardTask {
 public:
  BackwardTask(const AttentionBackward& g, const Blocking& size, const BackwardPlan& plan,
               int64_t chunk)
      : g_(g),
        a_(g.forward),
        s_(g.forward.shape),
        size_(size),
        plan_(plan),
        chunk_(chunk),
        begin_(chunk * plan.chunk_keys),
        keys_(std::min(plan.chunk_keys, s_.keys - begin_)) {
    Carver carver;
    for (int pass = 0; pass < 2; ++pass) {
      if (pass == 1) carver.allocate();
      const int64_t key_pad = round_up(keys_, size_.panel_cols);
      const int64_t bq = size_.block_queries;
      k_panels_ = carver.take(key_pad * s_.head_dim);
      v_panels_ = carver.take(key_pad * s_.value_dim);
      k_rows_ = carver.take(keys_ * size_.head_pad);
      dk_ = carver.take(keys_ * size_.head_pad);
      dv_ = carver.take(keys_ * size_.value_pad);
      q_panels_ = carver.take(bq * s_.head_dim);
      do_panels_ = carver.take(bq * s_.value_dim);
      q_rows_ = carver.take(bq * size_.head_pad);
      do_rows_ = carver.take(bq * size_.value_pad);
      dq_ = carver.take(bq * size_.head_pad);
      scores_ = carver.take(bq * kScoreStride);
      dp_ = carver.take(bq * kScoreStride);
      out_row_ = carver.take(s_.value_dim);
      delta_ = carver.take(bq);
      shares_ = carver.take(bq);
      share_rows_ = carver.take(2 * s_.head_dim);
      mask_row_ = carver.take(kBlockKeys);
      factor_row_ = carver.take(kBlockKeys);
    }
  }

  // One batch entry and key head: all query heads that read it.
  void run(int64_t b, int64_t kv) {
    pack_rows(gemm_, a_.k, a_.storage, a_.k_strides, b, kv, begin_, keys_, s_.head_dim,
              size_.panel_cols, k_panels_);
    pack_rows(gemm_, a_.v, a_.storage, a_.v_strides, b, kv, begin_, keys_, s_.value_dim,
              size_.panel_cols, v_panels_);
    if (g_.dq != nullptr) {
      load_rows(a_.k, a_.storage, a_.k_strides, b, kv, begin_, keys_, s_.head_dim, k_rows_,
                size_.head_pad);
    }
    std::fill(dk_, dk_ + keys_ * size_.head_pad, 0.0f);
    std::fill(dv_, dv_ + keys_ * size_.value_pad, 0.0f);
    const int64_t group = s_.heads / s_.kv_heads;
    for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
      for (int64_t block = 0; block < size_.query_blocks; ++block) query_block(b, h, block);
    }
    for (int64_t j = 0; j < keys_; ++j) {
      if (g_.dk != nullptr) {
        store_row(dk_ + j * size_.head_pad, a_.storage, s_.head_dim, g_.dk,
                  offset(g_.dk_strides, b, kv, begin_ + j));
      }
      if (g_.dv != nullptr) {
        store_row(dv_ + j * size_.value_pad, a_.storage, s_.value_dim, g_.dv,
                  offset(g_.dv_strides, b, kv, begin_ + j));
      }
    }
  }

 private:
  void query_block(int64_t b, int64_t h, int64_t block) {
    const int64_t bq = size_.block_queries;
    const int64_t i0 = block * bq;
    const int64_t rows = std::min(bq, s_.queries - i0);
    const int64_t seen_keys = std::clamp<int64_t>(visible_keys(a_, i0 + rows) - begin_, 0, keys_);
    std::fill(dq_, dq_ + rows * size_.head_pad, 0.0f);
    if (seen_keys > 0) {
      load_queries(b, h, i0, rows);
      MaskRows mask(a_, mask_row_);
      for (int64_t j0 = 0; j0 < seen_keys; j0 += kBlockKeys) {
        block_pair(b, h, i0, rows, j0, std::min(kBlockKeys, seen_keys - j0), mask);
      }
    }
    if (g_.dq == nullptr) return;
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = dq_ + r * size_.head_pad;
      if (plan_.chunks == 1) {
        store_row(row, a_.storage, s_.head_dim, g_.dq, offset(g_.dq_strides, b, h, i0 + r));
      } else {
        // Heads of no width have no workspace either.
        std::copy_n(row, s_.head_dim, partial_row(b, h, i0 + r));
      }
    }
  }

  float* partial_row(int64_t b, int64_t h, int64_t i) const {
    const int64_t row = ((chunk_ * s_.batch + b) * s_.heads + h) * s_.queries + i;
    return static_cast<float*>(g_.workspace) + row * s_.head_dim;
  }

  void load_queries(int64_t b, int64_t h, int64_t i0, int64_t rows) {
    pack_rows(gemm_, a_.q, a_.storage, a_.q_strides, b, h, i0, rows, s_.head_dim, size_.panel_rows,
              q_panels_);
    pack_rows(gemm_, g_.dout, a_.storage, g_.dout_strides, b, h, i0, rows, s_.value_dim,
              size_.panel_rows, do_panels_);
    if (g_.dk != nullptr) {
      load_rows(a_.q, a_.storage, a_.q_strides, b, h, i0, rows, s_.head_dim, q_rows_,
                size_.head_pad);
    }
    load_rows(g_.dout, a_.storage, g_.dout_strides, b, h, i0, rows, s_.value_dim, do_rows_,
              size_.value_pad);
    for (int64_t r = 0; r < rows; ++r) {
      load_row(a_.out, a_.storage, offset(a_.out_strides, b, h, i0 + r), s_.value_dim, out_row_);
      delta_[r] = ops_.dot(out_row_, do_rows_ + r * size_.value_pad, s_.value_dim);
      shares_[r] = share_of(b, h, i0 + r);
    }
  }

  // What probabilities that are computed of the logsumexp have to be multiplied by.
  float share_of(int64_t b, int64_t h, int64_t i) {
    const float lse = static_cast<const float*>(a_.logsumexp)[a_.rows.of(b, h, i)];
    if (!hides_sum(lse)) return 1.0f;
    const int64_t keys = visible_keys(a_, i + 1);
    const int64_t kv = h / (s_.heads / s_.kv_heads);
    float *const q = share_rows_, *const k = q + s_.head_dim;
    MaskRows mask(a_, mask_row_);
    load_row(a_.q, a_.storage, offset(a_.q_strides, b, h, i), s_.head_dim, q);
    double sum = 0;
    for (int64_t j0 = 0; j0 < keys; j0 += kBlockKeys) {
      const int64_t cols = std::min(kBlockKeys, keys - j0);
      const float* const added = mask.row(b, h, i, j0, cols);
      for (int64_t c = 0; c < cols; ++c) {
        load_row(a_.k, a_.storage, offset(a_.k_strides, b, kv, j0 + c), s_.head_dim, k);
        float score = ops_.dot(q, k, s_.head_dim) * static_cast<float>(a_.options.scale);
        if (added != nullptr) score += added[c];
        sum += std::exp(static_cast<double>(score) - static_cast<double>(lse));
      }
    }
    return sum > 0 && std::isfinite(sum) ? static_cast<float>(1.0 / sum) : 1.0f;
  }

  // Scores, probabilities and gradients of `rows` queries against keys [j0, j0 + cols) of the
  // chunk.
  void block_pair(int64_t b, int64_t h, int64_t i0, int64_t rows, int64_t j0, int64_t cols,
                  MaskRows& mask) {
    GemmBlock product;
    product.rows = rows;
    product.cols = round_up(cols, size_.panel_cols);
    product.accumulate = false;
    product.a_layout = GemmBlock::A::kPanels;
    product.a_stride = 0;
    product.b_stride = size_.panel_cols;
    product.ldc = kScoreStride;

    product.depth = s_.head_dim;
    product.alpha = static_cast<float>(a_.options.scale);
    product.a = q_panels_;
    product.b = k_panels_ + j0 * s_.head_dim;
    product.b_panel = size_.panel_cols * s_.head_dim;
    product.c = scores_;
    gemm_block(product);

    product.depth = s_.value_dim;
    product.alpha = 1.0f;
    product.a = do_panels_;
    product.b = v_panels_ + j0 * s_.value_dim;
    product.b_panel = size_.panel_cols * s_.value_dim;
    product.c = dp_;
    gemm_block(product);

    const float* lse = static_cast<const float*>(a_.logsumexp);
    const DropoutRows dropout(a_, factor_row_);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = i0 + r;
      const int64_t row_index = a_.rows.of(b, h, i);
      float* p = scores_ + r * kScoreStride;
      float* ds = dp_ + r * kScoreStride;
      const int64_t seen =
          a_.options.causal ? std::clamp<int64_t>(i + 1 - begin_ - j0, 0, cols) : cols;
      std::fill(p + seen, p + cols, 0.0f);
      std::fill(ds + seen, ds + cols, 0.0f);
      if (seen == 0) continue;
      const float* factor = dropout.active() ? dropout.row(row_index, begin_ + j0, seen) : nullptr;
      rows_ops_.gradient(p, ds, mask.row(b, h, i, begin_ + j0, seen), factor, lse[row_index],
                         delta_[r], seen);
      if (shares_[r] != 1.0f) {
        for (int64_t c = 0; c < seen; ++c) {
          p[c] *= shares_[r];
          ds[c] *= shares_[r];
        }
      }
      if (g_.dmask != nullptr) add_mask_gradient(b, h, i, begin_ + j0, seen, ds);
    }

    // dv += p^T dout, dk += scale ds^T q, dq += scale ds k.
    product.accumulate = true;
    product.a_layout = GemmBlock::A::kColumns;
    product.a_stride = kScoreStride;
    product.rows = cols;
    product.depth = rows;
    product.b_panel = size_.panel_cols;
    if (g_.dv != nullptr) {
      product.cols = size_.value_pad;
      product.a = scores_;
      product.b = do_rows_;
      product.b_stride = product.ldc = size_.value_pad;
      product.c = dv_ + j0 * size_.value_pad;
      gemm_block(product);
    }
    product.alpha = static_cast<float>(a_.options.scale);
    product.cols = size_.head_pad;
    product.b_stride = product.ldc = size_.head_pad;
    product.a = dp_;
    if (g_.dk != nullptr) {
      product.b = q_rows_;
      product.c = dk_ + j0 * size_.head_pad;
      gemm_block(product);
    }
    if (g_.dq != nullptr) {
      product.a_layout = GemmBlock::A::kRows;
      product.rows = rows;
      product.depth = cols;
      product.b = k_rows_ + j0 * size_.head_pad;
      product.c = dq_;
      gemm_block(product);
    }
  }

  void add_mask_gradient(int64_t b, int64_t h, int64_t i, int64_t j, int64_t n, const float* ds) {
    const AttentionMask& m = a_.mask;
    float* out = static_cast<float*>(g_.dmask) + b * m.batch + h * m.head + i * m.row + j * m.col;
    if (m.col == 1) {
      ops_.add(ds, out, n);
    } else if (m.col == 0) {
      *out += ops_.sum(ds, n);
    } else {
      for (int64_t c = 0; c < n; ++c) out[c * m.col] += ds[c];
    }
  }

  const AttentionBackward& g_;
  const AttentionForward& a_;
  const AttentionShape& s_;
  const Blocking& size_;
  const BackwardPlan& plan_;
  const int64_t chunk_, begin_, keys_;
  const GemmKernels<float> gemm_ = gemm_kernels_f32();
  const RowOps<float> ops_ = row_ops<float>();
  const AttentionRows rows_ops_ = attention_rows();
  float *k_panels_, *v_panels_, *k_rows_, *dk_, *dv_;
  float *q_panels_, *do_panels_, *q_rows_, *do_rows_, *dq_, *scores_, *dp_;
  float *out_row_, *delta_, *shares_, *share_rows_, *mask_row_, *factor_row_;
};

void sum_partial_dq(const AttentionBackward& g, const BackwardPlan& plan) {
  const AttentionShape& s = g.forward.shape;
  const RowOps<float> ops = row_ops<float>();
  const int64_t rows = s.batch * s.heads * s.queries;
  const float* partial = static_cast<const float*>(g.workspace);
  parallel_for(rows, 64, [&](int64_t begin, int64_t end) {
    float* sum = scratch<float>(ScratchSlot::kAttention, s.head_dim);
    for (int64_t row = begin; row < end; ++row) {
      std::copy_n(partial + row * s.head_dim, s.head_dim, sum);
      for (int64_t c = 1; c < plan.chunks; ++c) {
        ops.add(partial + (c * rows + row) * s.head_dim, sum, s.head_dim);
      }
      const int64_t i = row % s.queries;
      const int64_t h = row / s.queries % s.heads;
      const int64_t b = row / s.queries / s.heads;
      store_row(sum, g.forward.storage, s.head_dim, g.dq, offset(g.dq_strides, b, h, i));
    }
  });
}

}  // namespace

int64_t attention_backward_workspace(const AttentionShape& s, const AttentionMask& mask,
                                     bool wants_dmask) {
  const BackwardPlan plan(s, mask, wants_dmask);
  if (plan.chunks == 1) return 0;
  return plan.chunks * s.batch * s.heads * s.queries * s.head_dim *
         static_cast<int64_t>(sizeof(float));
}

void attention_blocked(const AttentionBackward& g) {
  const AttentionForward& a = g.forward;
  const AttentionShape& s = a.shape;
  const Blocking size(s, gemm_kernels_f32());
  const BackwardPlan plan(s, a.mask, g.dmask != nullptr);
  if (g.dmask != nullptr) {
    float* dmask = static_cast<float*>(g.dmask);
    std::fill(dmask, dmask + g.mask_size, 0.0f);
  }
  const int64_t group_heads = plan.mask_per_head ? s.kv_heads : 1;
  for_each_task(s, plan.groups * plan.chunks, [&](int64_t task) {
    const int64_t group = task / plan.chunks;
    BackwardTask work(g, size, plan, task % plan.chunks);
    const int64_t b = group / group_heads;
    const int64_t kv = group % group_heads;
    const int64_t b_end = plan.mask_per_batch ? b + 1 : s.batch;
    const int64_t kv_end = plan.mask_per_head ? kv + 1 : s.kv_heads;
    for (int64_t each_b = plan.mask_per_batch ? b : 0; each_b < b_end; ++each_b) {
      for (int64_t each_kv = plan.mask_per_head ? kv : 0; each_kv < kv_end; ++each_kv) {
        work.run(each_b, each_kv);
      }
    }
  });
  if (g.dq != nullptr && plan.chunks > 1) sum_partial_dq(g, plan);
}

void attention_blocked(const AttentionBackward& g, const AttentionSequences& sequences) {
  clear_rest(g, sequences);
  const int64_t heads = g.forward.shape.kv_heads;
  for_each_task(g.forward.shape, sequences.count * heads, [&](int64_t task) {
    const AttentionBackward one = sequence_of(g, sequences, task / heads);
    if (one.forward.shape.queries == 0) return;
    const Blocking size(one.forward.shape, gemm_kernels_f32());
    const BackwardPlan plan(one.forward.shape);
    BackwardTask(one, size, plan, 0).run(0, task % heads);
  });
}

}  // namespace ortrain::cpu
