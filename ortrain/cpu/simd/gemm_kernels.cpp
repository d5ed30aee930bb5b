// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/simd/gemm_kernels.h"

#include <algorithm>
#include <type_traits>

#include "ortrain/cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ortrain/cpu/simd/gemm_kernels.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ortrain::cpu {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Two vectors of columns; as many rows as leave registers for them and one broadcast.
#if HWY_MAX_BYTES >= 64
constexpr int kPanelRows = 14;
#else
constexpr int kPanelRows = 6;
#endif
template <class T>
constexpr int64_t kPanelCols = 2 * HWY_LANES(T);

constexpr int64_t kChunk = 512;

template <class T>
HWY_INLINE const T* Run(const void* source, Storage storage, int64_t offset, int64_t n, T* buffer) {
  if constexpr (std::is_same_v<T, float>) {
    if (storage == Storage::kBF16 || storage == Storage::kF16) {
      widen(storage, static_cast<const uint16_t*>(source) + offset, buffer, n);
      return buffer;
    }
  }
  (void)storage, (void)n, (void)buffer;
  return static_cast<const T*>(source) + offset;
}

#if HWY_TARGET != HWY_SCALAR
// Transposes `lanes` rows of 4 consecutive floats each: out[p] holds element p of every row.
template <class D>
HWY_INLINE void TransposeFour(D d, const float* const* rows, hn::Vec<D>* out) {
  const hn::CappedTag<float, 4> d128;
  const hn::Repartition<uint64_t, D> d64;
  hn::Vec<D> v[4];
  for (int j = 0; j < 4; ++j) {
    // 128-bit block b holds row 4 b + j.
#if HWY_MAX_BYTES >= 64
    const hn::Half<D> half;
    v[j] = hn::Combine(
        d, hn::Combine(half, hn::LoadU(d128, rows[12 + j]), hn::LoadU(d128, rows[8 + j])),
        hn::Combine(half, hn::LoadU(d128, rows[4 + j]), hn::LoadU(d128, rows[j])));
#elif HWY_MAX_BYTES >= 32
    v[j] = hn::Combine(d, hn::LoadU(d128, rows[4 + j]), hn::LoadU(d128, rows[j]));
#else
    v[j] = hn::LoadU(d128, rows[j]);
#endif
  }
  const auto a = hn::BitCast(d64, hn::InterleaveLower(d, v[0], v[1]));
  const auto b = hn::BitCast(d64, hn::InterleaveUpper(d, v[0], v[1]));
  const auto c = hn::BitCast(d64, hn::InterleaveLower(d, v[2], v[3]));
  const auto e = hn::BitCast(d64, hn::InterleaveUpper(d, v[2], v[3]));
  out[0] = hn::BitCast(d, hn::InterleaveLower(d64, a, c));
  out[1] = hn::BitCast(d, hn::InterleaveUpper(d64, a, c));
  out[2] = hn::BitCast(d, hn::InterleaveLower(d64, b, e));
  out[3] = hn::BitCast(d, hn::InterleaveUpper(d64, b, e));
}

void PackContiguousF32(const float* in, int64_t stride, int64_t count, int64_t depth, int64_t width,
                       float* HWY_RESTRICT packed) {
  const hn::ScalableTag<float> d;
  constexpr int64_t kLanes = HWY_LANES(float);
  for (int64_t first = 0; first < width; first += kLanes) {
    const int64_t stored = std::min(kLanes, width - first);
    const int64_t valid = std::clamp<int64_t>(count - first, 0, stored);
    const auto store = hn::FirstN(d, static_cast<size_t>(stored));
    const auto keep = hn::FirstN(d, static_cast<size_t>(valid));
    float* out = packed + first;
    // Rows beyond `count` read the last row again; their lanes are cleared.
    const float* rows[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) rows[i] = in + std::min(first + i, count - 1) * stride;
    int64_t p = 0;
    for (; p + 4 <= depth; p += 4) {
      hn::Vec<decltype(d)> columns[4];
      TransposeFour(d, rows, columns);
      for (int64_t i = 0; i < kLanes; ++i) rows[i] += 4;
      for (int64_t q = 0; q < 4; ++q) {
        hn::BlendedStore(hn::IfThenElseZero(keep, columns[q]), store, d, out + (p + q) * width);
      }
    }
    for (; p < depth; ++p) {
      for (int64_t i = 0; i < stored; ++i) {
        out[p * width + i] = i < valid ? in[(first + i) * stride + p] : 0.0f;
      }
    }
  }
}
#endif

template <class T>
void PackContiguous(const void* source, Storage storage, int64_t stride, int64_t count,
                    int64_t depth, int64_t width, T* HWY_RESTRICT packed) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (std::is_same_v<T, float>) {
    if (storage == Storage::kF32 && count > 0) {
      PackContiguousF32(static_cast<const float*>(source), stride, count, depth, width, packed);
      return;
    }
  }
#endif
  HWY_ALIGN T buffer[kChunk];
  if (count < width) std::fill(packed, packed + depth * width, T{0});
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t p = 0; p < depth; p += kChunk) {
      const int64_t n = std::min(kChunk, depth - p);
      const T* row = Run(source, storage, i * stride + p, n, buffer);
      for (int64_t q = 0; q < n; ++q) packed[(p + q) * width + i] = row[q];
    }
  }
}

template <class T>
void PackStrided(const void* source, Storage storage, int64_t stride, int64_t count, int64_t depth,
                 int64_t width, T* HWY_RESTRICT packed) {
  HWY_ALIGN T buffer[kChunk];
  for (int64_t p = 0; p < depth; ++p) {
    const T* row = Run(source, storage, p * stride, count, buffer);
    T* out = packed + p * width;
    std::copy(row, row + count, out);
    std::fill(out + count, out + width, T{0});
  }
}

// kRows x kPanelCols of A * B in registers. Rows of A lie kRowStride apart and steps of depth
// a_step; rows of B lie `b_stride` apart. `c` is either C itself or, for a partial column panel, a
// buffer with its own leading dimension.
template <int kRows, int64_t kRowStride, class T>
HWY_INLINE void MicroKernel(int64_t depth, const T* HWY_RESTRICT a, int64_t a_step,
                            const T* HWY_RESTRICT b, int64_t b_stride, T alpha, T beta,
                            T* HWY_RESTRICT c, int64_t ldc, const T* HWY_RESTRICT bias) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  constexpr int64_t kLanes = HWY_LANES(T);
  V sum0[kRows];
  V sum1[kRows];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) sum0[i] = sum1[i] = hn::Zero(d);
  for (int64_t p = 0; p < depth; ++p) {
    const V b0 = hn::LoadU(d, b);
    const V b1 = hn::LoadU(d, b + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const V ai = hn::Set(d, a[i * kRowStride]);
      sum0[i] = hn::MulAdd(ai, b0, sum0[i]);
      sum1[i] = hn::MulAdd(ai, b1, sum1[i]);
    }
    a += a_step;
    b += b_stride;
  }
  const V scale = hn::Set(d, alpha);
  V bias0 = hn::Zero(d);
  V bias1 = hn::Zero(d);
  if (bias != nullptr) {
    bias0 = hn::LoadU(d, bias);
    bias1 = hn::LoadU(d, bias + kLanes);
  }
  const V keep = hn::Set(d, beta);
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    V out0 = hn::MulAdd(sum0[i], scale, bias0);
    V out1 = hn::MulAdd(sum1[i], scale, bias1);
    T* row = c + i * ldc;
    if (beta != T{0}) {
      out0 = hn::MulAdd(keep, hn::LoadU(d, row), out0);
      out1 = hn::MulAdd(keep, hn::LoadU(d, row + kLanes), out1);
    }
    hn::StoreU(out0, d, row);
    hn::StoreU(out1, d, row + kLanes);
  }
}

template <int64_t kRowStride, class T>
HWY_INLINE void RowPanel(int64_t rows, int64_t depth, const T* a, int64_t a_step, const T* b,
                         int64_t b_stride, T alpha, T beta, T* c, int64_t ldc, const T* bias) {
  if (rows == kPanelRows) {
    MicroKernel<kPanelRows, kRowStride>(depth, a, a_step, b, b_stride, alpha, beta, c, ldc, bias);
    return;
  }
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) {
    MicroKernel<4, kRowStride>(depth, a + i * kRowStride, a_step, b, b_stride, alpha, beta,
                               c + i * ldc, ldc, bias);
  }
  for (; i < rows; ++i) {
    MicroKernel<1, kRowStride>(depth, a + i * kRowStride, a_step, b, b_stride, alpha, beta,
                               c + i * ldc, ldc, bias);
  }
}

template <class T>
void RunTile(const GemmTile<T>& tile) {
  constexpr int64_t kCols = kPanelCols<T>;
  HWY_ALIGN T edge[kPanelRows * kCols];
  for (int64_t j = 0; j < tile.cols; j += kCols) {
    const int64_t cols = std::min(kCols, tile.cols - j);
    const bool partial = cols < kCols;
    const T* b = partial ? tile.b_edge : tile.b + j / kCols * tile.b_panel;
    const int64_t b_stride = partial ? kCols : tile.b_stride;
    const T* bias = tile.bias == nullptr ? nullptr : tile.bias + j;
    for (int64_t i = 0; i < tile.rows; i += kPanelRows) {
      const int64_t rows = std::min<int64_t>(kPanelRows, tile.rows - i);
      const T* a = tile.a + i * tile.depth;
      T* c = tile.c + i * tile.ldc + j;
      if (!partial) {
        RowPanel<1>(rows, tile.depth, a, kPanelRows, b, b_stride, tile.alpha, tile.beta, c,
                    tile.ldc, bias);
        continue;
      }
      RowPanel<1, T>(rows, tile.depth, a, kPanelRows, b, b_stride, tile.alpha, T{0}, edge, kCols,
                     nullptr);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t q = 0; q < cols; ++q) {
          T value = edge[r * kCols + q];
          if (bias != nullptr) value += bias[q];
          if (tile.beta != T{0}) value += tile.beta * c[r * tile.ldc + q];
          c[r * tile.ldc + q] = value;
        }
      }
    }
  }
}

template <int64_t kRowStride>
HWY_INLINE void BlockPanels(const GemmBlock& g, int64_t a_panel, int64_t a_step) {
  constexpr int64_t kCols = kPanelCols<float>;
  for (int64_t j = 0; j < g.cols; j += kCols) {
    const float* b = g.b + j / kCols * g.b_panel;
    for (int64_t i = 0; i < g.rows; i += kPanelRows) {
      const int64_t rows = std::min<int64_t>(kPanelRows, g.rows - i);
      RowPanel<kRowStride, float>(rows, g.depth, g.a + i * a_panel, a_step, b, g.b_stride, g.alpha,
                                  g.accumulate ? 1.0f : 0.0f, g.c + i * g.ldc + j, g.ldc, nullptr);
    }
  }
}

void RunBlock(const GemmBlock& g) {
  switch (g.a_layout) {
    case GemmBlock::A::kPanels:
      return BlockPanels<1>(g, g.depth, kPanelRows);
    case GemmBlock::A::kColumns:
      return BlockPanels<1>(g, 1, g.a_stride);
    case GemmBlock::A::kRows:
      return BlockPanels<GemmBlock::kRowStride>(g, GemmBlock::kRowStride, 1);
  }
}

template <int kRows, class T>
HWY_INLINE void DotRows(const GemmDots<T>& g) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  constexpr int64_t kLanes = HWY_LANES(T);
  for (int64_t i = 0; i < g.x_rows; ++i) {
    const T* HWY_RESTRICT x = g.x + i * g.x_stride;
    // Two chains per dot product hide half of the latency; the loop is bound by memory.
    V sum0[kRows];
    V sum1[kRows];
#pragma GCC unroll 4
    for (int j = 0; j < kRows; ++j) sum0[j] = sum1[j] = hn::Zero(d);
    int64_t p = 0;
    for (; p + 2 * kLanes <= g.depth; p += 2 * kLanes) {
      const V x0 = hn::LoadU(d, x + p);
      const V x1 = hn::LoadU(d, x + p + kLanes);
#pragma GCC unroll 4
      for (int j = 0; j < kRows; ++j) {
        const T* y = g.y + j * g.y_stride + p;
        sum0[j] = hn::MulAdd(x0, hn::LoadU(d, y), sum0[j]);
        sum1[j] = hn::MulAdd(x1, hn::LoadU(d, y + kLanes), sum1[j]);
      }
    }
    for (int j = 0; j < kRows; ++j) {
      T sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0[j], sum1[j])));
      const T* y = g.y + j * g.y_stride;
      for (int64_t q = p; q < g.depth; ++q) sum += x[q] * y[q];
      T value = g.alpha * sum;
      if (g.bias != nullptr) value += g.bias[i * g.bias_x_stride + j * g.bias_y_stride];
      T& out = g.c[i * g.c_x_stride + j * g.c_y_stride];
      out = g.beta != T{0} ? value + g.beta * out : value;
    }
  }
}

template <class T>
void RunDots(const GemmDots<T>& g) {
  switch (g.y_rows) {
    case 1:
      return DotRows<1>(g);
    case 2:
      return DotRows<2>(g);
    case 3:
      return DotRows<3>(g);
    default:
      return DotRows<4>(g);
  }
}

template <class T>
GemmKernels<T> Kernels() {
  return {kPanelRows, kPanelCols<T>, PackContiguous<T>, PackStrided<T>, RunTile<T>, RunDots<T>};
}

GemmKernels<float> KernelsF32() { return Kernels<float>(); }
GemmKernels<double> KernelsF64() { return Kernels<double>(); }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace ortrain::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ortrain::cpu {

HWY_EXPORT(KernelsF32);
GemmKernels<float> gemm_kernels_f32() { return HWY_DYNAMIC_DISPATCH(KernelsF32)(); }

HWY_EXPORT(RunBlock);
void gemm_block(const GemmBlock& block) { HWY_DYNAMIC_DISPATCH(RunBlock)(block); }

HWY_EXPORT(KernelsF64);
GemmKernels<double> gemm_kernels_f64() { return HWY_DYNAMIC_DISPATCH(KernelsF64)(); }

}  // namespace ortrain::cpu
#endif  // HWY_ONCE
