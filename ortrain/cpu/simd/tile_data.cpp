// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "ortrain/base/half.h"
#include "ortrain/base/philox.h"
#include "ortrain/cpu/simd/targets.h"
#include "ortrain/cpu/simd/tile_ops.h"
#include "ortrain/ir/expr_scalar.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ortrain/cpu/simd/tile_data.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "ortrain/cpu/simd/philox-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ortrain::cpu {
namespace HWY_NAMESPACE {
namespace {

// --- select

template <class T, unsigned kSingle>
void TileSelect(const void* c, const void* a, const void* b, void* y, int64_t n) {
  const uint8_t* condition = static_cast<const uint8_t*>(c);
  const T* left = static_cast<const T*>(a);
  const T* right = static_cast<const T*>(b);
  T* out = static_cast<T*>(y);
  const uint8_t single_condition = (kSingle & 1) ? condition[0] : 0;
  const T single_left = (kSingle & 2) ? left[0] : T{0};
  const T single_right = (kSingle & 4) ? right[0] : T{0};
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    // Both are read, so that the choice needs no branch.
    const T u = (kSingle & 2) ? single_left : left[i];
    const T v = (kSingle & 4) ? single_right : right[i];
    out[i] = ((kSingle & 1) ? single_condition : condition[i]) != 0 ? u : v;
  }
}

// The bits of floats move as integers.
template <class T>
TileFn SelectOf(unsigned single) {
  switch (single) {
    case 0:
      return TileSelect<T, 0>;
    case 1:
      return TileSelect<T, 1>;
    case 2:
      return TileSelect<T, 2>;
    case 3:
      return TileSelect<T, 3>;
    case 4:
      return TileSelect<T, 4>;
    case 5:
      return TileSelect<T, 5>;
    case 6:
      return TileSelect<T, 6>;
    default:
      return nullptr;
  }
}

TileFn FindSelect(int64_t bytes, unsigned single) {
  switch (bytes) {
    case 1:
      return SelectOf<uint8_t>(single);
    case 4:
      return SelectOf<uint32_t>(single);
    case 8:
      return SelectOf<uint64_t>(single);
    default:
      return nullptr;
  }
}

// --- conversions

template <class From, class To>
void TileCast(const void* a, const void*, const void*, void* y, int64_t n) {
  const From* in = static_cast<const From*>(a);
  To* out = static_cast<To*>(y);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = expr::convert<To>(in[i]);
}

template <class From>
TileFn CastFrom(DType to) {
  switch (to) {
    case DType::f32:
      return TileCast<From, float>;
    case DType::f64:
      return TileCast<From, double>;
    case DType::i32:
      return TileCast<From, int32_t>;
    case DType::i64:
      return TileCast<From, int64_t>;
    case DType::boolean:
      return TileCast<From, bool>;
    default:
      return nullptr;
  }
}

TileFn FindCast(DType from, DType to) {
  switch (from) {
    case DType::f32:
      return CastFrom<float>(to);
    case DType::f64:
      return CastFrom<double>(to);
    case DType::i32:
      return CastFrom<int32_t>(to);
    case DType::i64:
      return CastFrom<int64_t>(to);
    case DType::boolean:
      return CastFrom<bool>(to);
    default:
      return nullptr;
  }
}

template <size_t kBytes>
void TileCopy(const void* a, const void*, const void*, void* y, int64_t n) {
  std::memmove(y, a, static_cast<size_t>(n) * kBytes);
}

void LoadBf16(const void* a, const void*, const void*, void* y, int64_t n) {
  const uint16_t* in = static_cast<const uint16_t*>(a);
  uint32_t* out = static_cast<uint32_t*>(y);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint32_t>(in[i]) << 16;
}

void StoreBf16(const void* a, const void*, const void*, void* y, int64_t n) {
  const uint32_t* in = static_cast<const uint32_t*>(a);
  uint16_t* out = static_cast<uint16_t*>(y);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t word = in[i];
    const uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
    const uint32_t quiet = (word >> 16) | 0x40u;
    out[i] = static_cast<uint16_t>((word & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
  }
}

// Half precision: with F16C the processor converts; before it the scalar type does.
void LoadF16(const void* a, const void*, const void*, void* y, int64_t n) {
  const Float16* in = static_cast<const Float16*>(a);
  float* out = static_cast<float*>(y);
  int64_t i = 0;
#if HWY_TARGET <= HWY_AVX2
  const hn::ScalableTag<float> df;
  const hn::Rebind<hwy::float16_t, decltype(df)> dh;
  const hn::Rebind<uint16_t, decltype(df)> du;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  for (; i + lanes <= n; i += lanes) {
    const auto bits = hn::LoadU(du, reinterpret_cast<const uint16_t*>(in + i));
    hn::StoreU(hn::PromoteTo(df, hn::BitCast(dh, bits)), df, out + i);
  }
#endif
  for (; i < n; ++i) out[i] = static_cast<float>(in[i]);
}

void StoreF16(const void* a, const void*, const void*, void* y, int64_t n) {
  const float* in = static_cast<const float*>(a);
  Float16* out = static_cast<Float16*>(y);
  int64_t i = 0;
#if HWY_TARGET <= HWY_AVX2
  const hn::ScalableTag<float> df;
  const hn::Rebind<hwy::float16_t, decltype(df)> dh;
  const hn::Rebind<uint16_t, decltype(df)> du;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  for (; i + lanes <= n; i += lanes) {
    const auto half = hn::DemoteTo(dh, hn::LoadU(df, in + i));
    hn::StoreU(hn::BitCast(du, half), du, reinterpret_cast<uint16_t*>(out + i));
  }
#endif
  for (; i < n; ++i) out[i] = Float16(in[i]);
}

TileFn FindCopy(DType type) {
  switch (type) {
    case DType::f32:
    case DType::i32:
      return TileCopy<4>;
    case DType::f64:
    case DType::i64:
      return TileCopy<8>;
    case DType::boolean:
      return TileCopy<1>;
    default:
      return nullptr;
  }
}

TileFn FindLoad(DType storage) {
  if (storage == DType::bf16) return LoadBf16;
  if (storage == DType::f16) return LoadF16;
  return FindCopy(storage);
}

TileFn FindStore(DType storage) {
  if (storage == DType::bf16) return StoreBf16;
  if (storage == DType::f16) return StoreF16;
  return FindCopy(storage);
}

// --- rows

// Four vectors of partial sums, then the lanes, then the rest.
template <class T>
T SumRow(const T* x, int64_t n) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum0 = hn::Zero(d);
  auto sum1 = sum0;
  auto sum2 = sum0;
  auto sum3 = sum0;
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    sum0 = hn::Add(sum0, hn::LoadU(d, x + i));
    sum1 = hn::Add(sum1, hn::LoadU(d, x + i + lanes));
    sum2 = hn::Add(sum2, hn::LoadU(d, x + i + 2 * lanes));
    sum3 = hn::Add(sum3, hn::LoadU(d, x + i + 3 * lanes));
  }
  for (; i + lanes <= n; i += lanes) sum0 = hn::Add(sum0, hn::LoadU(d, x + i));
  T sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3))));
  for (; i < n; ++i) sum += x[i];
  return sum;
}

// NaN wins: once a lane is NaN it stays.
template <class T, bool kMax>
T ExtremeRow(const T* x, int64_t n) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  T result = x[0];
  int64_t i = 0;
  if (n >= lanes) {
    auto best = hn::LoadU(d, x);
    for (i = lanes; i + lanes <= n; i += lanes) {
      const auto v = hn::LoadU(d, x + i);
      const auto better = kMax ? hn::Gt(best, v) : hn::Lt(best, v);
      best = hn::IfThenElse(hn::Or(better, hn::Not(hn::Eq(best, best))), best, v);
    }
    HWY_ALIGN T buffer[HWY_MAX_BYTES / sizeof(T)];
    hn::Store(best, d, buffer);
    result = buffer[0];
    for (int64_t lane = 1; lane < lanes; ++lane) {
      result = kMax ? expr::max(result, buffer[lane]) : expr::min(result, buffer[lane]);
    }
  }
  for (; i < n; ++i) result = kMax ? expr::max(result, x[i]) : expr::min(result, x[i]);
  return result;
}

void RefuseEmpty(int64_t columns) {
  if (columns == 0) throw ShapeError("the maximum or minimum of an empty row does not exist");
}

template <class T, ExprOp kOp>
void ReduceRows(const void* x, void* y, int64_t rows, int64_t columns) {
  const T* in = static_cast<const T*>(x);
  T* out = static_cast<T*>(y);
  if (kOp == ExprOp::row_max || kOp == ExprOp::row_min) RefuseEmpty(columns);
  for (int64_t row = 0; row < rows; ++row, in += columns) {
    if constexpr (kOp == ExprOp::row_sum) out[row] = SumRow(in, columns);
    if constexpr (kOp == ExprOp::row_mean) out[row] = SumRow(in, columns) / static_cast<T>(columns);
    if constexpr (kOp == ExprOp::row_max) out[row] = ExtremeRow<T, true>(in, columns);
    if constexpr (kOp == ExprOp::row_min) out[row] = ExtremeRow<T, false>(in, columns);
  }
}

// No mean: its sum needs more bits than T has.
template <class T, ExprOp kOp>
void ReduceIntegerRows(const void* x, void* y, int64_t rows, int64_t columns) {
  const T* in = static_cast<const T*>(x);
  T* out = static_cast<T*>(y);
  const bool extreme = kOp == ExprOp::row_max || kOp == ExprOp::row_min;
  if (extreme) RefuseEmpty(columns);
  for (int64_t row = 0; row < rows; ++row, in += columns) {
    T result = extreme ? in[0] : T{0};
    for (int64_t c = 0; c < columns; ++c) {
      if constexpr (kOp == ExprOp::row_max) {
        result = expr::max(result, in[c]);
      } else if constexpr (kOp == ExprOp::row_min) {
        result = expr::min(result, in[c]);
      } else {
        result = expr::add(result, in[c]);
      }
    }
    out[row] = result;
  }
}

RowFn FindReduction(ExprOp op, DType type) {
  const auto of = [op](RowFn sum, RowFn mean, RowFn max, RowFn min) -> RowFn {
    switch (op) {
      case ExprOp::row_sum:
        return sum;
      case ExprOp::row_mean:
        return mean;
      case ExprOp::row_max:
        return max;
      case ExprOp::row_min:
        return min;
      default:
        return nullptr;
    }
  };
  using enum ExprOp;
  switch (type) {
    case DType::f32:
      return of(ReduceRows<float, row_sum>, ReduceRows<float, row_mean>, ReduceRows<float, row_max>,
                ReduceRows<float, row_min>);
    case DType::f64:
      return of(ReduceRows<double, row_sum>, ReduceRows<double, row_mean>,
                ReduceRows<double, row_max>, ReduceRows<double, row_min>);
    case DType::i32:
      return of(ReduceIntegerRows<int32_t, row_sum>, nullptr, ReduceIntegerRows<int32_t, row_max>,
                ReduceIntegerRows<int32_t, row_min>);
    case DType::i64:
      return of(ReduceIntegerRows<int64_t, row_sum>, nullptr, ReduceIntegerRows<int64_t, row_max>,
                ReduceIntegerRows<int64_t, row_min>);
    default:
      return nullptr;
  }
}

template <class T>
void SpreadRows(const void* x, void* y, int64_t rows, int64_t columns) {
  const T* in = static_cast<const T*>(x);
  T* out = static_cast<T*>(y);
  for (int64_t row = 0; row < rows; ++row, out += columns) std::fill_n(out, columns, in[row]);
}

RowFn FindSpread(int64_t bytes) {
  switch (bytes) {
    case 1:
      return SpreadRows<uint8_t>;
    case 4:
      return SpreadRows<uint32_t>;
    case 8:
      return SpreadRows<uint64_t>;
    default:
      return nullptr;
  }
}

// --- dropout

constexpr int64_t kDropoutBlocks = 64;

// Calls body(words, i, count) for runs of the stream: words[k] belongs to element i + k.
template <class Body>
HWY_INLINE void ForWords(const DropoutDraw& draw, int64_t n, Body body) {
  HWY_ALIGN uint32_t words[4 * kDropoutBlocks];
  int64_t i = 0;
  while (i < n) {
    const uint64_t element = draw.first + static_cast<uint64_t>(i);
    const int64_t skipped = static_cast<int64_t>(element % 4);
    const int64_t count = std::min(4 * kDropoutBlocks - skipped, n - i);
    PhiloxWords(draw.seed, draw.stream, element / 4, (skipped + count + 3) / 4, words);
    body(words + skipped, i, count);
    i += count;
  }
}

template <class T>
HWY_INLINE void Dropout(const T* x, T* y, int64_t n, const DropoutDraw& draw) {
  const uint32_t threshold = dropout_threshold(draw.ratio);
  const T scale = static_cast<T>(dropout_scale(draw.ratio));
  ForWords(draw, n, [=](const uint32_t* words, int64_t first, int64_t count) HWY_ATTR {
    const T* in = x + first;
    T* out = y + first;
#pragma GCC ivdep
    for (int64_t k = 0; k < count; ++k) out[k] = in[k] * (words[k] >= threshold ? scale : T{0});
  });
}

void DropoutF32(const float* x, float* y, int64_t n, const DropoutDraw& draw) {
  Dropout(x, y, n, draw);
}

void DropoutF64(const double* x, double* y, int64_t n, const DropoutDraw& draw) {
  Dropout(x, y, n, draw);
}

void DropoutMask(bool* y, int64_t n, const DropoutDraw& draw) {
  const uint32_t threshold = dropout_threshold(draw.ratio);
  const bool possible = draw.ratio < 1.0;
  ForWords(draw, n, [=](const uint32_t* words, int64_t first, int64_t count) HWY_ATTR {
    for (int64_t k = 0; k < count; ++k) y[first + k] = words[k] >= threshold && possible;
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace ortrain::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ortrain::cpu {

HWY_EXPORT(FindSelect);
HWY_EXPORT(FindCast);
HWY_EXPORT(FindLoad);
HWY_EXPORT(FindStore);
HWY_EXPORT(FindReduction);
HWY_EXPORT(FindSpread);
HWY_EXPORT(DropoutF32);
HWY_EXPORT(DropoutF64);
HWY_EXPORT(DropoutMask);

TileFn tile_select(DType type, unsigned single) {
  return HWY_DYNAMIC_DISPATCH(FindSelect)(static_cast<int64_t>(size_of(type)), single);
}
TileFn tile_cast(DType from, DType to) { return HWY_DYNAMIC_DISPATCH(FindCast)(from, to); }
TileFn tile_load(DType storage) { return HWY_DYNAMIC_DISPATCH(FindLoad)(storage); }
TileFn tile_store(DType storage) { return HWY_DYNAMIC_DISPATCH(FindStore)(storage); }
RowFn tile_reduction(ExprOp op, DType type) {
  return HWY_DYNAMIC_DISPATCH(FindReduction)(op, type);
}
RowFn tile_spread(DType type) {
  return HWY_DYNAMIC_DISPATCH(FindSpread)(static_cast<int64_t>(size_of(type)));
}
void tile_dropout(const float* x, float* y, int64_t n, const DropoutDraw& draw) {
  HWY_DYNAMIC_DISPATCH(DropoutF32)(x, y, n, draw);
}
void tile_dropout(const double* x, double* y, int64_t n, const DropoutDraw& draw) {
  HWY_DYNAMIC_DISPATCH(DropoutF64)(x, y, n, draw);
}
void tile_dropout_mask(bool* y, int64_t n, const DropoutDraw& draw) {
  HWY_DYNAMIC_DISPATCH(DropoutMask)(y, n, draw);
}

TileFn tile_function(ExprOp op, DType type, unsigned single) {
  if (op == ExprOp::select) return tile_select(type, single);
  return expr_op_info(op).operands == 1 ? tile_unary(op, type) : tile_binary(op, type, single);
}

}  // namespace ortrain::cpu
#endif  // HWY_ONCE
