// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ortrain/base/philox.h"
#include "ortrain/cpu/attention.h"
#include "ortrain/cpu/scratch.h"
#include "ortrain/cpu/simd/attention_rows.h"
#include "ortrain/cpu/simd/dropout_factors.h"
#include "ortrain/cpu/simd/gemm_kernels.h"
#include "ortrain/cpu/simd/row_ops.h"
#include "ortrain/cpu/threads.h"

namespace ortrain::cpu {
namespace {

constexpr int64_t kBlockKeys = 256;
constexpr int64_t kBlockQueries = 72;  // at most; a multiple of the panel height is taken
constexpr int64_t kScoreStride = GemmBlock::kRowStride;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Sizes that follow from the shape and the vector width alone.
struct Blocking {
  Blocking(const AttentionShape& s, const GemmKernels<float>& k)
      : panel_rows(k.panel_rows),
        panel_cols(k.panel_cols),
        head_pad(round_up(s.head_dim, k.panel_cols)),
        value_pad(round_up(s.value_dim, k.panel_cols)) {
    const int64_t most = kBlockQueries / panel_rows * panel_rows;
    const int64_t even = ceil_div(s.queries, std::max<int64_t>(1, ceil_div(s.queries, most)));
    block_queries = round_up(std::max<int64_t>(even, 1), panel_rows);
    query_blocks = ceil_div(s.queries, block_queries);
  }
  int64_t panel_rows, panel_cols, head_pad, value_pad, block_queries, query_blocks;
};

// Cuts one thread's scratch memory into arrays that start on cache lines.
class Carver {
 public:
  // First pass: sums sizes. Second pass: hands out addresses.
  float* take(int64_t count) {
    const int64_t begin = used_;
    used_ += round_up(count, 16);
    return base_ == nullptr ? nullptr : base_ + begin;
  }
  void allocate() {
    base_ = scratch<float>(ScratchSlot::kAttention, used_);
    used_ = 0;
  }

 private:
  float* base_ = nullptr;
  int64_t used_ = 0;
};

const void* element(const void* base, Storage storage, int64_t index) {
  return static_cast<const char*>(base) + index * storage_size(storage);
}

int64_t offset(const AttentionStrides& s, int64_t b, int64_t h, int64_t row) {
  return b * s.batch + h * s.head + row * s.row;
}

void load_row(const void* base, Storage storage, int64_t index, int64_t n, float* out) {
  const void* source = element(base, storage, index);
  if (storage == Storage::kF32) {
    std::memcpy(out, source, static_cast<size_t>(n) * sizeof(float));
  } else {
    widen(storage, static_cast<const uint16_t*>(source), out, n);
  }
}

void store_row(const float* values, Storage storage, int64_t n, void* base, int64_t index) {
  void* target = const_cast<void*>(element(base, storage, index));
  if (storage == Storage::kF32) {
    std::memcpy(target, values, static_cast<size_t>(n) * sizeof(float));
  } else {
    narrow(storage, values, static_cast<uint16_t*>(target), n);
  }
}

// Rows [row, row + rows) of one head as floats, `ld` apart, zero from `n` to `ld`.
void load_rows(const void* base, Storage storage, const AttentionStrides& strides, int64_t b,
               int64_t h, int64_t row, int64_t rows, int64_t n, float* out, int64_t ld) {
  for (int64_t i = 0; i < rows; ++i) {
    load_row(base, storage, offset(strides, b, h, row + i), n, out + i * ld);
    std::fill(out + i * ld + n, out + (i + 1) * ld, 0.0f);
  }
}

// The same rows as panels of `width`, transposed.
void pack_rows(const GemmKernels<float>& kernels, const void* base, Storage storage,
               const AttentionStrides& strides, int64_t b, int64_t h, int64_t row, int64_t rows,
               int64_t n, int64_t width, float* out) {
  for (int64_t i = 0; i < rows; i += width) {
    kernels.pack_contiguous(element(base, storage, offset(strides, b, h, row + i)), storage,
                            strides.row, std::min(width, rows - i), n, width, out + i * n);
  }
}

// Rows of the mask as floats to add, or null where there is nothing to add.
class MaskRows {
 public:
  MaskRows(const AttentionForward& a, float* buffer)
      : mask_(a.mask), storage_(a.storage), buffer_(buffer) {}

  const float* row(int64_t b, int64_t h, int64_t i, int64_t j, int64_t n) {
    if (mask_.kind == AttentionMask::Kind::kNone) return nullptr;
    const int64_t index = b * mask_.batch + h * mask_.head + i * mask_.row + j * mask_.col;
    if (mask_.kind == AttentionMask::Kind::kFloat && storage_ == Storage::kF32 &&
        (mask_.col == 1 || n == 1)) {
      return static_cast<const float*>(mask_.data) + index;
    }
    // Masks that repeat from query to query are converted once per block.
    if (index == held_index_ && n <= held_) return buffer_;
    held_index_ = index;
    held_ = n;
    if (mask_.kind == AttentionMask::Kind::kBool) {
      const bool* see = static_cast<const bool*>(mask_.data) + index;
      if (mask_.col == 1) {
        for (int64_t c = 0; c < n; ++c) buffer_[c] = see[c] ? 0.0f : -kInfinity;
      } else {
        for (int64_t c = 0; c < n; ++c) buffer_[c] = see[c * mask_.col] ? 0.0f : -kInfinity;
      }
    } else if (mask_.col == 1) {
      load_row(mask_.data, storage_, index, n, buffer_);
    } else {
      for (int64_t c = 0; c < n; ++c) {
        load_row(mask_.data, storage_, index + c * mask_.col, 1, buffer_ + c);
      }
    }
    return buffer_;
  }

 private:
  const AttentionMask& mask_;
  const Storage storage_;
  float* const buffer_;
  int64_t held_index_ = -1;
  int64_t held_ = 0;
};

// Dropout factors of one row of scores.
struct DropoutRows {
  explicit DropoutRows(const AttentionForward& a, float* buffer)
      : options(a.options),
        rows(a.rows),
        threshold(dropout_threshold(a.options.dropout)),
        scale(static_cast<float>(dropout_scale(a.options.dropout))),
        buffer(buffer) {}

  bool active() const { return options.dropout > 0.0; }
  const float* row(int64_t row_index, int64_t j, int64_t n) const {
    const int64_t begin = rows.draw(row_index, j);
    dropout_factors(options.seed, options.stream, threshold, scale, begin, begin + n, buffer);
    return buffer;
  }

  const AttentionOptions& options;
  const AttentionRowIndex& rows;
  const uint32_t threshold;
  const float scale;
  float* const buffer;
};

// Hands out tasks, unless the whole problem is smaller than the cost of waking the threads.
template <class Fn>
void for_each_task(const AttentionShape& s, int64_t tasks, Fn fn) {
  constexpr int64_t kSerialWork = 200'000;
  if (s.batch * s.heads * s.queries * s.keys * (s.head_dim + s.value_dim) < kSerialWork) {
    for (int64_t task = 0; task < tasks; ++task) fn(task);
  } else {
    parallel_blocks(tasks, fn);
  }
}

int64_t visible_keys(const AttentionForward& a, int64_t query_end) {
  return a.options.causal ? std::min(a.shape.keys, query_end) : a.shape.keys;
}

// ---------------------------------------------------------------------------------- forward

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

// --------------------------------------------------------------------------------- backward

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
        std::memcpy(partial_row(b, h, i0 + r), row,
                    static_cast<size_t>(s_.head_dim) * sizeof(float));
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
    }
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
      const float* factor =
          dropout.active() ? dropout.row(row_index, begin_ + j0, seen) : nullptr;
      rows_ops_.gradient(p, ds, mask.row(b, h, i, begin_ + j0, seen), factor, lse[row_index],
                         delta_[r], seen);
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
  float *out_row_, *delta_, *mask_row_, *factor_row_;
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
