// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "ortrain/base/philox.h"
#include "ortrain/cpu/attention.h"
#include "ortrain/cpu/scratch.h"
#include "ortrain/cpu/simd/dropout_factors.h"
#include "ortrain/cpu/simd/gemm_kernels.h"
#include "ortrain/cpu/threads.h"

// What the blocked forward and backward share: how the work is cut, and how rows are read.
namespace ortrain::cpu::attention_blocks {

constexpr int64_t kBlockKeys = 256;
constexpr int64_t kBlockQueries = 72;  // at most; a multiple of the panel height is taken
constexpr int64_t kScoreStride = GemmBlock::kRowStride;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

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

inline const void* element(const void* base, Storage storage, int64_t index) {
  return static_cast<const char*>(base) + index * storage_size(storage);
}

inline int64_t offset(const AttentionStrides& s, int64_t b, int64_t h, int64_t row) {
  return b * s.batch + h * s.head + row * s.row;
}

inline void load_row(const void* base, Storage storage, int64_t index, int64_t n, float* out) {
  const void* source = element(base, storage, index);
  if (storage == Storage::kF32) {
    std::memcpy(out, source, static_cast<size_t>(n) * sizeof(float));
  } else {
    widen(storage, static_cast<const uint16_t*>(source), out, n);
  }
}

inline void store_row(const float* values, Storage storage, int64_t n, void* base, int64_t index) {
  void* target = const_cast<void*>(element(base, storage, index));
  if (storage == Storage::kF32) {
    std::memcpy(target, values, static_cast<size_t>(n) * sizeof(float));
  } else {
    narrow(storage, values, static_cast<uint16_t*>(target), n);
  }
}

// Rows [row, row + rows) of one head as floats, `ld` apart, zero from `n` to `ld`.
inline void load_rows(const void* base, Storage storage, const AttentionStrides& strides, int64_t b,
                      int64_t h, int64_t row, int64_t rows, int64_t n, float* out, int64_t ld) {
  for (int64_t i = 0; i < rows; ++i) {
    load_row(base, storage, offset(strides, b, h, row + i), n, out + i * ld);
    std::fill(out + i * ld + n, out + (i + 1) * ld, 0.0f);
  }
}

// The same rows as panels of `width`, transposed.
inline void pack_rows(const GemmKernels<float>& kernels, const void* base, Storage storage,
                      const AttentionStrides& strides, int64_t b, int64_t h, int64_t row,
                      int64_t rows, int64_t n, int64_t width, float* out) {
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
        threshold(half_threshold(a.options.dropout)),
        scale(static_cast<float>(half_scale(a.options.dropout))),
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
inline void for_each_task(const AttentionShape& s, int64_t tasks, Fn fn) {
  constexpr int64_t kSerialWork = 200'000;
  if (s.batch * s.heads * s.queries * s.keys * (s.head_dim + s.value_dim) < kSerialWork) {
    for (int64_t task = 0; task < tasks; ++task) fn(task);
  } else {
    parallel_blocks(tasks, fn);
  }
}

inline int64_t visible_keys(const AttentionForward& a, int64_t query_end) {
  return a.options.causal ? std::min(a.shape.keys, query_end) : a.shape.keys;
}

}  // namespace ortrain::cpu::attention_blocks
