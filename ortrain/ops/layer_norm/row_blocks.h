// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "ortrain/base/dim.h"
#include "ortrain/cpu/row_access.h"
#include "ortrain/cpu/threads.h"

namespace ortrain::ops {

// x as rows that are normalized each: everything from `axis` on is one row.
struct NormRows {
  int64_t count = 1, size = 1;
  NormRows(const Dims& dims, int64_t axis) {
    const size_t at = static_cast<size_t>(normalize_axis(axis, dims.size()));
    for (size_t i = 0; i < dims.size(); ++i) (i < at ? count : size) *= dims[i];
  }
};

// Rows cut into blocks by the shape alone: sums over rows made per block and then over the blocks
// come out the same whatever the number of threads.
struct RowBlocks {
  int64_t rows, count;
  RowBlocks(int64_t rows, int64_t row_size) : rows(rows) {
    constexpr int64_t kMost = 32;
    const int64_t grain = std::max<int64_t>(cpu::row_grain(row_size), 4);
    count = std::clamp<int64_t>(rows / grain, 1, kMost);
  }
  int64_t begin(int64_t block) const { return rows * block / count; }
  int64_t end(int64_t block) const { return rows * (block + 1) / count; }
};

// out[j] = the sum over blocks b of partial[b * stride + j], for j < n.
template <class T, class C>
void sum_blocks(const C* partial, int64_t blocks, int64_t stride, int64_t n, T* out) {
  cpu::parallel_for(n, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      C sum = partial[j];
      for (int64_t b = 1; b < blocks; ++b) sum += partial[b * stride + j];
      out[j] = static_cast<T>(sum);
    }
  });
}

}  // namespace ortrain::ops
