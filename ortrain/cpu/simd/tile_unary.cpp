// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "ortrain/cpu/simd/targets.h"
#include "ortrain/cpu/simd/tile_ops.h"
#include "ortrain/ir/expr_scalar.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ortrain/cpu/simd/tile_unary.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "ortrain/cpu/simd/math-inl.h"
#include "ortrain/cpu/simd/tile_loops-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ortrain::cpu {
namespace HWY_NAMESPACE {
namespace {

template <class D, class V>
HWY_INLINE V SignOf(D d, V x) {
  const V zero = hn::Zero(d);
  const V one = hn::Set(d, 1);
  const V positive = hn::IfThenElse(hn::Gt(x, zero), one, x);  // zero and NaN stay
  return hn::IfThenElse(hn::Lt(x, zero), hn::Neg(one), positive);
}

// With m = exp(|x|) - 1: sinh|x| = (m + m / (m + 1)) / 2, accurate near 0. exp(|x|) overflows
// before sinh does: there sinh|x| = exp(|x| / 2)^2 / 2.
template <class D, class V>
HWY_INLINE V SinhOf(D d, V x) {
  using T = hn::TFromD<D>;
  const V half = hn::Set(d, static_cast<T>(0.5));
  const V a = hn::Abs(x);
  const V m = Expm1(d, a);
  const V near = hn::Mul(half, hn::Add(m, hn::Div(m, hn::Add(m, hn::Set(d, 1)))));
  const V root = Exp(d, hn::Mul(half, a));
  const V far = hn::Mul(hn::Mul(half, root), root);
  const auto large = hn::Gt(a, hn::Set(d, static_cast<T>(sizeof(T) == 4 ? 80 : 700)));
  return hn::CopySign(hn::IfThenElse(large, far, near), x);
}

template <class D, class V>
HWY_INLINE V CoshOf(D d, V x) {
  using T = hn::TFromD<D>;
  const V half = hn::Set(d, static_cast<T>(0.5));
  const V root = Exp(d, hn::Mul(half, hn::Abs(x)));
  const V e = hn::Mul(root, root);
  const V low = hn::Div(half, e);
  return hn::MulAdd(hn::Mul(half, root), root, low);
}

// Rounds the low 16 bits away, to nearest even; NaN stays.
template <class D, class V>
HWY_INLINE V RoundBf16(D d, V x) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded =
      hn::And(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFFu))), hn::Set(du, 0xFFFF0000u));
  return hn::IfThenElse(hn::Eq(x, x), hn::BitCast(d, rounded), x);
}

#define ORTRAIN_TILE_UNARY(name, expression)                                 \
  template <class T>                                                         \
  void name(const void* a, const void*, const void*, void* y, int64_t n) {   \
    MapTile<T>(a, y, n, [](auto d, auto x) HWY_ATTR { return expression; }); \
  }
ORTRAIN_TILE_UNARY(TileNeg, ((void)d, hn::Neg(x)))
ORTRAIN_TILE_UNARY(TileAbs, ((void)d, hn::Abs(x)))
ORTRAIN_TILE_UNARY(TileSign, SignOf(d, x))
ORTRAIN_TILE_UNARY(TileRelu, hn::IfThenZeroElse(hn::Lt(x, hn::Zero(d)), x))
ORTRAIN_TILE_UNARY(TileExp, Exp(d, x))
ORTRAIN_TILE_UNARY(TileExpm1, Expm1(d, x))
ORTRAIN_TILE_UNARY(TileLog, Log(d, x))
ORTRAIN_TILE_UNARY(TileLog1p, Log1p(d, x))
ORTRAIN_TILE_UNARY(TileSqrt, ((void)d, hn::Sqrt(x)))
ORTRAIN_TILE_UNARY(TileRsqrt, hn::Div(hn::Set(d, 1), hn::Sqrt(x)))
ORTRAIN_TILE_UNARY(TileReciprocal, hn::Div(hn::Set(d, 1), x))
ORTRAIN_TILE_UNARY(TileTanh, Tanh(d, x))
ORTRAIN_TILE_UNARY(TileSigmoid, Sigmoid(d, x))
ORTRAIN_TILE_UNARY(TileErf, Erf(d, x))
ORTRAIN_TILE_UNARY(TileSinh, SinhOf(d, x))
ORTRAIN_TILE_UNARY(TileCosh, CoshOf(d, x))
ORTRAIN_TILE_UNARY(TileFloor, ((void)d, hn::Floor(x)))
ORTRAIN_TILE_UNARY(TileCeil, ((void)d, hn::Ceil(x)))
ORTRAIN_TILE_UNARY(TileRound, ((void)d, hn::Round(x)))
#undef ORTRAIN_TILE_UNARY

void TileToBf16(const void* a, const void*, const void*, void* y, int64_t n) {
  MapTile<float>(a, y, n, [](auto d, auto x) HWY_ATTR { return RoundBf16(d, x); });
}

// No vector form: the C library, one by one.
template <class T, T (*kFunction)(T)>
void TileEach(const void* a, const void*, const void*, void* y, int64_t n) {
  const T* in = static_cast<const T*>(a);
  T* out = static_cast<T*>(y);
  for (int64_t i = 0; i < n; ++i) out[i] = kFunction(in[i]);
}

// Integers: plain loops, which the compiler vectorizes for the target.
template <class T, T (*kFunction)(T)>
void TileInteger(const void* a, const void*, const void*, void* y, int64_t n) {
  const T* in = static_cast<const T*>(a);
  T* out = static_cast<T*>(y);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = kFunction(in[i]);
}

template <class T>
TileFn FindReal(ExprOp op) {
  switch (op) {
    case ExprOp::neg:
      return TileNeg<T>;
    case ExprOp::abs:
      return TileAbs<T>;
    case ExprOp::sign:
      return TileSign<T>;
    case ExprOp::relu:
      return TileRelu<T>;
    case ExprOp::exp:
      return TileExp<T>;
    case ExprOp::expm1:
      return TileExpm1<T>;
    case ExprOp::log:
      return TileLog<T>;
    case ExprOp::log1p:
      return TileLog1p<T>;
    case ExprOp::sqrt:
      return TileSqrt<T>;
    case ExprOp::rsqrt:
      return TileRsqrt<T>;
    case ExprOp::reciprocal:
      return TileReciprocal<T>;
    case ExprOp::tanh:
      return TileTanh<T>;
    case ExprOp::sigmoid:
      return TileSigmoid<T>;
    case ExprOp::erf:
      return TileErf<T>;
    case ExprOp::sinh:
      return TileSinh<T>;
    case ExprOp::cosh:
      return TileCosh<T>;
    case ExprOp::floor:
      return TileFloor<T>;
    case ExprOp::ceil:
      return TileCeil<T>;
    case ExprOp::round:
      return TileRound<T>;
    default:
      return nullptr;
  }
}

float RoundF16(float x) { return static_cast<float>(Float16(x)); }

template <class T>
T BitNot(T x) {
  return ~x;
}

template <class T>
TileFn FindInteger(ExprOp op) {
  switch (op) {
    case ExprOp::neg:
      return TileInteger<T, expr::neg<T>>;
    case ExprOp::abs:
      return TileInteger<T, expr::abs<T>>;
    case ExprOp::sign:
      return TileInteger<T, expr::sign<T>>;
    case ExprOp::relu:
      return TileInteger<T, expr::relu<T>>;
    case ExprOp::bit_not:
      return TileInteger<T, BitNot<T>>;
    default:
      return nullptr;
  }
}

uint8_t LogicalNot(uint8_t x) { return x ^ 1; }

TileFn FindUnary(ExprOp op, DType type) {
  switch (type) {
    case DType::f32:
      if (op == ExprOp::to_bf16) return TileToBf16;
      if (op == ExprOp::to_f16) return TileEach<float, RoundF16>;
      return FindReal<float>(op);
    case DType::f64:
      return FindReal<double>(op);
    case DType::i32:
      return FindInteger<int32_t>(op);
    case DType::i64:
      return FindInteger<int64_t>(op);
    case DType::boolean:
      return op == ExprOp::logical_not ? TileInteger<uint8_t, LogicalNot> : nullptr;
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

HWY_EXPORT(FindUnary);
TileFn tile_unary(ExprOp op, DType type) {
  const TileFn found = HWY_DYNAMIC_DISPATCH(FindUnary)(op, type);
  return found != nullptr ? found : tile_trigonometric(op, type);
}

}  // namespace ortrain::cpu
#endif  // HWY_ONCE
