// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ortrain/cpu/storage.h"

namespace ortrain::cpu {

// One tile of C = alpha * A * B + beta * C + bias, from packed panels.
template <class T>
struct GemmTile {
  int64_t rows, cols, depth;
  T alpha, beta;     // beta = 0: C is not read
  const T* a;        // panels of `panel_rows` rows, [depth][panel_rows] each
  const T* b;        // panels of `panel_cols` columns
  int64_t b_panel;   // from one panel to the next
  int64_t b_stride;  // from one row of a panel to the next
  const T*
      b_edge;  // the last, partial panel, packed with stride panel_cols; used if cols has a rest
  T* c;
  int64_t ldc;
  const T* bias;  // [cols] or null
};

// C[i, j] = alpha * <x_i, y_j> + beta * C[i, j] + bias: few rows y against many rows x, no packing.
template <class T>
struct GemmDots {
  int64_t x_rows, y_rows, depth;  // y_rows <= kMost
  T alpha, beta;
  const T* x;
  int64_t x_stride;
  const T* y;
  int64_t y_stride;
  T* c;
  int64_t c_x_stride, c_y_stride;
  const T* bias;  // or null
  int64_t bias_x_stride, bias_y_stride;

  static constexpr int64_t kMost = 4;
};

// One small product in registers and L1, for kernels that drive their own blocking:
// C[rows, cols] = alpha * A * B, added to C if `accumulate`. `cols` is a multiple of the panel
// width (GemmKernels::panel_cols), so operands are padded to it.
struct GemmBlock {
  enum class A {
    kPanels,   // as packed by pack_contiguous with width panel_rows
    kRows,     // row-major, rows kRowStride apart
    kColumns,  // transposed: element (i, p) at a[p * a_stride + i]
  };
  static constexpr int64_t kRowStride = 272;  // 256 and a bit, so that rows differ in cache set

  int64_t rows, cols, depth;
  float alpha;
  bool accumulate;
  A a_layout;
  const float* a;
  int64_t a_stride;  // kColumns only
  const float* b;
  int64_t b_panel;   // from one panel of columns to the next
  int64_t b_stride;  // from one row of a panel to the next
  float* c;
  int64_t ldc;
};

void gemm_block(const GemmBlock& block);

// The pieces of a packed GEMM for the best SIMD target of this machine.
template <class T>
struct GemmKernels {
  int64_t panel_rows;
  int64_t panel_cols;
  // Packs `count` <= width vectors of length `depth` as [depth][width], zero beyond `count`.
  // Vectors lie `stride` apart with contiguous elements, ...
  void (*pack_contiguous)(const void* source, Storage storage, int64_t stride, int64_t count,
                          int64_t depth, int64_t width, T* packed);
  // ... or elements lie `stride` apart with contiguous vectors.
  void (*pack_strided)(const void* source, Storage storage, int64_t stride, int64_t count,
                       int64_t depth, int64_t width, T* packed);
  void (*run)(const GemmTile<T>& tile);
  void (*dots)(const GemmDots<T>& dots);
};

GemmKernels<float> gemm_kernels_f32();
GemmKernels<double> gemm_kernels_f64();

}  // namespace ortrain::cpu
