// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "ortrain/cpu/simd/targets.h"
#include "ortrain/cpu/simd/tile_ops.h"
#include "ortrain/ir/expr_scalar.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ortrain/cpu/simd/tile_binary.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "ortrain/cpu/simd/tile_loops-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ortrain::cpu {
namespace HWY_NAMESPACE {
namespace {

#define ORTRAIN_TILE_BINARY(name, expression)                                                     \
  template <class T, unsigned kSingle>                                                            \
  void name(const void* a, const void* b, const void*, void* y, int64_t n) {                      \
    ZipTile<T, kSingle>(                                                                          \
        a, b, y, n, []([[maybe_unused]] auto d, auto u, auto v) HWY_ATTR { return expression; }); \
  }
ORTRAIN_TILE_BINARY(TileAdd, hn::Add(u, v))
ORTRAIN_TILE_BINARY(TileSub, hn::Sub(u, v))
ORTRAIN_TILE_BINARY(TileMul, hn::Mul(u, v))
ORTRAIN_TILE_BINARY(TileDiv, hn::Div(u, v))
// NaN of either operand wins. Not(Eq) since Ne is false for NaN on some targets.
ORTRAIN_TILE_BINARY(TileMin, hn::IfThenElse(hn::Or(hn::Lt(u, v), hn::Not(hn::Eq(u, u))), u, v))
ORTRAIN_TILE_BINARY(TileMax, hn::IfThenElse(hn::Or(hn::Gt(u, v), hn::Not(hn::Eq(u, u))), u, v))
#undef ORTRAIN_TILE_BINARY

// Plain loops: of integers the compiler vectorizes them for the target, the rest is scalar.
template <class T, class R, unsigned kSingle, R (*kFunction)(T, T)>
void TilePlain(const void* a, const void* b, const void*, void* y, int64_t n) {
  const T* left = static_cast<const T*>(a);
  const T* right = static_cast<const T*>(b);
  R* out = static_cast<R*>(y);
  const T single_left = (kSingle & 1) ? left[0] : T{0};
  const T single_right = (kSingle & 2) ? right[0] : T{0};
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    out[i] =
        kFunction((kSingle & 1) ? single_left : left[i], (kSingle & 2) ? single_right : right[i]);
  }
}

template <class T, class R, R (*kFunction)(T, T)>
TileFn Plain(unsigned single) {
  switch (single) {
    case 0:
      return TilePlain<T, R, 0, kFunction>;
    case 1:
      return TilePlain<T, R, 1, kFunction>;
    case 2:
      return TilePlain<T, R, 2, kFunction>;
    default:
      return nullptr;
  }
}

template <class T>
HWY_INLINE uint8_t EqualTo(T a, T b) {
  return a == b;
}
template <class T>
HWY_INLINE uint8_t NotEqualTo(T a, T b) {
  return a != b;
}
template <class T>
HWY_INLINE uint8_t LessThan(T a, T b) {
  return a < b;
}
template <class T>
HWY_INLINE uint8_t LessOrEqual(T a, T b) {
  return a <= b;
}

template <class T>
TileFn FindCompare(ExprOp op, unsigned single) {
  switch (op) {
    case ExprOp::eq:
      return Plain<T, uint8_t, EqualTo<T>>(single);
    case ExprOp::ne:
      return Plain<T, uint8_t, NotEqualTo<T>>(single);
    case ExprOp::lt:
      return Plain<T, uint8_t, LessThan<T>>(single);
    case ExprOp::le:
      return Plain<T, uint8_t, LessOrEqual<T>>(single);
    default:
      return nullptr;
  }
}

template <class T, unsigned kSingle>
TileFn FindVector(ExprOp op) {
  switch (op) {
    case ExprOp::add:
      return TileAdd<T, kSingle>;
    case ExprOp::sub:
      return TileSub<T, kSingle>;
    case ExprOp::mul:
      return TileMul<T, kSingle>;
    case ExprOp::div:
      return TileDiv<T, kSingle>;
    case ExprOp::min:
      return TileMin<T, kSingle>;
    case ExprOp::max:
      return TileMax<T, kSingle>;
    default:
      return nullptr;
  }
}

template <class T>
TileFn FindReal(ExprOp op, unsigned single) {
  const TileFn found = single == 0   ? FindVector<T, 0>(op)
                       : single == 1 ? FindVector<T, 1>(op)
                       : single == 2 ? FindVector<T, 2>(op)
                                     : nullptr;
  if (found != nullptr) return found;
  switch (op) {
    case ExprOp::fmod:
      return Plain<T, T, expr::fmod<T>>(single);
    case ExprOp::mod:
      return Plain<T, T, expr::mod<T>>(single);
    case ExprOp::floor_div:
      return Plain<T, T, expr::floor_div<T>>(single);
    case ExprOp::pow:
      return Plain<T, T, expr::pow<T>>(single);
    default:
      return FindCompare<T>(op, single);
  }
}

template <class T>
HWY_INLINE T BitAnd(T a, T b) {
  return a & b;
}
template <class T>
HWY_INLINE T BitOr(T a, T b) {
  return a | b;
}
template <class T>
HWY_INLINE T BitXor(T a, T b) {
  return a ^ b;
}

template <class T>
TileFn FindInteger(ExprOp op, unsigned single) {
  switch (op) {
    case ExprOp::add:
      return Plain<T, T, expr::add<T>>(single);
    case ExprOp::sub:
      return Plain<T, T, expr::sub<T>>(single);
    case ExprOp::mul:
      return Plain<T, T, expr::mul<T>>(single);
    case ExprOp::div:
      return Plain<T, T, expr::div<T>>(single);
    case ExprOp::fmod:
      return Plain<T, T, expr::fmod<T>>(single);
    case ExprOp::mod:
      return Plain<T, T, expr::mod<T>>(single);
    case ExprOp::floor_div:
      return Plain<T, T, expr::floor_div<T>>(single);
    case ExprOp::pow:
      return Plain<T, T, expr::pow<T>>(single);
    case ExprOp::min:
      return Plain<T, T, expr::min<T>>(single);
    case ExprOp::max:
      return Plain<T, T, expr::max<T>>(single);
    case ExprOp::bit_and:
      return Plain<T, T, BitAnd<T>>(single);
    case ExprOp::bit_or:
      return Plain<T, T, BitOr<T>>(single);
    case ExprOp::bit_xor:
      return Plain<T, T, BitXor<T>>(single);
    default:
      return FindCompare<T>(op, single);
  }
}

TileFn FindLogic(ExprOp op, unsigned single) {
  switch (op) {
    case ExprOp::logical_and:
      return Plain<uint8_t, uint8_t, BitAnd<uint8_t>>(single);
    case ExprOp::logical_or:
      return Plain<uint8_t, uint8_t, BitOr<uint8_t>>(single);
    case ExprOp::logical_xor:
      return Plain<uint8_t, uint8_t, BitXor<uint8_t>>(single);
    default:
      return FindCompare<uint8_t>(op, single);
  }
}

TileFn FindBinary(ExprOp op, DType type, unsigned single) {
  switch (type) {
    case DType::f32:
      return FindReal<float>(op, single);
    case DType::f64:
      return FindReal<double>(op, single);
    case DType::i32:
      return FindInteger<int32_t>(op, single);
    case DType::i64:
      return FindInteger<int64_t>(op, single);
    case DType::boolean:
      return FindLogic(op, single);
    default:
      return nullptr;
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace ortrain::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ortrain::cpu {

HWY_EXPORT(FindBinary);
TileFn tile_binary(ExprOp op, DType type, unsigned single) {
  return HWY_DYNAMIC_DISPATCH(FindBinary)(op, type, single);
}

}  // namespace ortrain::cpu
#endif  // HWY_ONCE
