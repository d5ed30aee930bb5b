// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "ortrain/cpu/simd/targets.h"
#include "ortrain/cpu/simd/tile_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ortrain/cpu/simd/tile_trigonometry.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After foreach_target, which includes it once per target.
#include "hwy/contrib/math/math-inl.h"
#include "ortrain/cpu/simd/tile_loops-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ortrain::cpu {
namespace HWY_NAMESPACE {
namespace {

// Two thirds of the range where Highway's reduction is accurate; beyond, the C library.
constexpr double kTrigonometricLimit = 26000.0;

template <class D, class V, class Vector, class Scalar>
HWY_INLINE V InRange(D d, V x, Vector vector_function, Scalar scalar_function) {
  using T = hn::TFromD<D>;
  if (HWY_LIKELY(
          hn::AllTrue(d, hn::Lt(hn::Abs(x), hn::Set(d, static_cast<T>(kTrigonometricLimit)))))) {
    return vector_function(x);
  }
  HWY_ALIGN T lanes[HWY_MAX_BYTES / sizeof(T)];
  hn::Store(x, d, lanes);
  for (size_t i = 0; i < hn::Lanes(d); ++i) lanes[i] = scalar_function(lanes[i]);
  return hn::Load(d, lanes);
}

template <class D, class V>
HWY_INLINE V SinOf(D d, V x) {
  using T = hn::TFromD<D>;
  return InRange(
      d, x, [d](V v) HWY_ATTR { return hn::Sin(d, v); }, [](T v) { return std::sin(v); });
}

template <class D, class V>
HWY_INLINE V CosOf(D d, V x) {
  using T = hn::TFromD<D>;
  return InRange(
      d, x, [d](V v) HWY_ATTR { return hn::Cos(d, v); }, [](T v) { return std::cos(v); });
}

template <class T>
void TileSin(const void* a, const void*, const void*, void* y, int64_t n) {
  MapTile<T>(a, y, n, [](auto d, auto x) HWY_ATTR { return SinOf(d, x); });
}

template <class T>
void TileCos(const void* a, const void*, const void*, void* y, int64_t n) {
  MapTile<T>(a, y, n, [](auto d, auto x) HWY_ATTR { return CosOf(d, x); });
}

// No vector form that is accurate over the whole range: the C library, one by one.
template <class T, T (*kFunction)(T)>
void TileEach(const void* a, const void*, const void*, void* y, int64_t n) {
  const T* in = static_cast<const T*>(a);
  T* out = static_cast<T*>(y);
  for (int64_t i = 0; i < n; ++i) out[i] = kFunction(in[i]);
}

template <class T>
TileFn Find(ExprOp op) {
  switch (op) {
    case ExprOp::sin:
      return TileSin<T>;
    case ExprOp::cos:
      return TileCos<T>;
    case ExprOp::tan:
      return TileEach<T, std::tan>;
    case ExprOp::asin:
      return TileEach<T, std::asin>;
    case ExprOp::acos:
      return TileEach<T, std::acos>;
    case ExprOp::atan:
      return TileEach<T, std::atan>;
    default:
      return nullptr;
  }
}

TileFn FindTrigonometric(ExprOp op, DType type) {
  if (type == DType::f32) return Find<float>(op);
  if (type == DType::f64) return Find<double>(op);
  return nullptr;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace ortrain::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ortrain::cpu {

HWY_EXPORT(FindTrigonometric);
TileFn tile_trigonometric(ExprOp op, DType type) {
  return HWY_DYNAMIC_DISPATCH(FindTrigonometric)(op, type);
}

}  // namespace ortrain::cpu
#endif  // HWY_ONCE
