// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/simd/row_ops.h"

#include <cmath>
#include <limits>

#include "ortrain/cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ortrain/cpu/simd/row_ops.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "ortrain/cpu/simd/math-inl.h"
#include "ortrain/cpu/simd/row_loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ortrain::cpu {
namespace HWY_NAMESPACE {
namespace {

template <class T>
using Tag = hn::ScalableTag<T>;

template <class T>
T Sum(const T* x, int64_t n) {
  const Tag<T> d;
  auto sum = hn::Zero(d);
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR { sum = hn::Add(sum, v.load(x + i)); });
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

template <class T>
T Max(const T* x, int64_t n) {
  const Tag<T> d;
  const auto lowest = hn::Set(d, -std::numeric_limits<T>::infinity());
  auto max = lowest;
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    max = hn::Max(max, v.valid_or(v.load(x + i), lowest));
  });
  return hn::GetLane(hn::MaxOfLanes(d, max));
}

template <class T>
T Dot(const T* x, const T* y, int64_t n) {
  const Tag<T> d;
  auto sum = hn::Zero(d);
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    sum = hn::MulAdd(v.load(x + i), v.load(y + i), sum);
  });
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

template <class T>
void Add(const T* x, T* y, int64_t n) {
  const Tag<T> d;
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    v.store(hn::Add(v.load(y + i), v.load(x + i)), y + i);
  });
}

template <class T>
void Axpy(T alpha, const T* x, T* y, int64_t n) {
  const Tag<T> d;
  const auto a = hn::Set(d, alpha);
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    v.store(hn::MulAdd(a, v.load(x + i), v.load(y + i)), y + i);
  });
}

template <class T>
void Scale(T alpha, T* x, int64_t n) {
  const Tag<T> d;
  const auto a = hn::Set(d, alpha);
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR { v.store(hn::Mul(a, v.load(x + i)), x + i); });
}

template <class T>
void Multiply(const T* x, T* y, int64_t n) {
  const Tag<T> d;
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    v.store(hn::Mul(v.load(y + i), v.load(x + i)), y + i);
  });
}

template <class T>
T ExpShifted(T shift, const T* x, T* y, int64_t n) {
  const Tag<T> d;
  const auto s = hn::Set(d, shift);
  auto sum = hn::Zero(d);
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    const auto e = Exp(d, hn::Sub(v.load(x + i), s));
    v.store(e, y + i);
    sum = hn::Add(sum, v.valid_or(e, hn::Zero(d)));
  });
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

template <class T>
T SumExpShifted(T shift, const T* x, int64_t n) {
  const Tag<T> d;
  const auto s = hn::Set(d, shift);
  auto sum = hn::Zero(d);
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    const auto e = Exp(d, hn::Sub(v.load(x + i), s));
    sum = hn::Add(sum, v.valid_or(e, hn::Zero(d)));
  });
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

template <class T>
void Softmax(const T* x, T* y, int64_t n) {
  const T sum = ExpShifted(Max(x, n), x, y, n);
  Scale(T{1} / sum, y, n);
}

template <class T>
void LogSoftmax(const T* x, T* y, int64_t n) {
  const Tag<T> d;
  const T max = Max(x, n);
  // Two subtractions: max + log(sum) would round away what the small terms say.
  const auto shift = hn::Set(d, max);
  const auto log_sum = hn::Set(d, std::log(SumExpShifted(max, x, n)));
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    v.store(hn::Sub(hn::Sub(v.load(x + i), shift), log_sum), y + i);
  });
}

template <class T>
void SoftmaxGrad(const T* dy, const T* y, T* dx, int64_t n) {
  const Tag<T> d;
  const auto dot = hn::Set(d, Dot(dy, y, n));
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    v.store(hn::Mul(v.load(y + i), hn::Sub(v.load(dy + i), dot)), dx + i);
  });
}

template <class T>
void LogSoftmaxGrad(const T* dy, const T* y, T* dx, int64_t n) {
  const Tag<T> d;
  const auto sum = hn::Set(d, Sum(dy, n));
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    v.store(hn::NegMulAdd(Exp(d, v.load(y + i)), sum, v.load(dy + i)), dx + i);
  });
}

template <class T>
void ExpAffine(T alpha, T shift, T offset, const T* x, T* dx, int64_t n) {
  const Tag<T> d;
  const auto a = hn::Set(d, alpha);
  const auto s = hn::Set(d, shift);
  const auto o = hn::Set(d, offset);
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    v.store(hn::MulAdd(a, Exp(d, hn::Sub(v.load(x + i), s)), o), dx + i);
  });
}

template <class T>
void LayerNorm(const T* x, const T* scale, const T* bias, T epsilon, T* y, T* mean, T* inv_std,
               int64_t n) {
  const Tag<T> d;
  // The rounding of the first mean, which counts when it is far from zero, is taken out again.
  const T rounded = Sum(x, n) / static_cast<T>(n);
  const auto m = hn::Set(d, rounded);
  auto sum = hn::Zero(d);
  auto squares = hn::Zero(d);
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    const auto c = v.valid_or(hn::Sub(v.load(x + i), m), hn::Zero(d));
    sum = hn::Add(sum, c);
    squares = hn::MulAdd(c, c, squares);
  });
  const T rest = hn::GetLane(hn::SumOfLanes(d, sum)) / static_cast<T>(n);
  const T variance = hn::GetLane(hn::SumOfLanes(d, squares)) / static_cast<T>(n) - rest * rest;
  const T r = T{1} / std::sqrt(variance + epsilon);
  const auto rv = hn::Set(d, r);
  const auto delta = hn::Set(d, rest);
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    auto h = hn::Mul(hn::Sub(hn::Sub(v.load(x + i), m), delta), rv);
    if (scale != nullptr) h = hn::Mul(h, v.load(scale + i));
    if (bias != nullptr) h = hn::Add(h, v.load(bias + i));
    v.store(h, y + i);
  });
  *mean = rounded + rest;
  *inv_std = r;
}

template <class T>
void LayerNormGrad(const T* dy, const T* x, const T* scale, T mean, T inv_std, T* dx, T* dscale,
                   T* dbias, int64_t n) {
  const Tag<T> d;
  const auto m = hn::Set(d, mean);
  const auto r = hn::Set(d, inv_std);
  auto sum_g = hn::Zero(d);
  auto sum_gh = hn::Zero(d);
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    const auto out = v.load(dy + i);
    const auto h = hn::Mul(hn::Sub(v.load(x + i), m), r);
    const auto g = scale != nullptr ? hn::Mul(out, v.load(scale + i)) : out;
    sum_g = hn::Add(sum_g, g);
    sum_gh = hn::MulAdd(g, h, sum_gh);  // lanes beyond the end have g = 0
    if (dscale != nullptr) v.store(hn::MulAdd(out, h, v.load(dscale + i)), dscale + i);
    if (dbias != nullptr) v.store(hn::Add(out, v.load(dbias + i)), dbias + i);
  });
  if (dx == nullptr) return;
  const T count = static_cast<T>(n);
  const auto mean_g = hn::Set(d, hn::GetLane(hn::SumOfLanes(d, sum_g)) / count);
  const auto mean_gh = hn::Set(d, hn::GetLane(hn::SumOfLanes(d, sum_gh)) / count);
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    const auto out = v.load(dy + i);
    const auto h = hn::Mul(hn::Sub(v.load(x + i), m), r);
    const auto g = scale != nullptr ? hn::Mul(out, v.load(scale + i)) : out;
    v.store(hn::Mul(r, hn::NegMulAdd(h, mean_gh, hn::Sub(g, mean_g))), dx + i);
  });
}

template <class T>
void RmsNorm(const T* x, const T* scale, T epsilon, T* y, T* inv_rms, int64_t n) {
  const Tag<T> d;
  const T r = T{1} / std::sqrt(Dot(x, x, n) / static_cast<T>(n) + epsilon);
  const auto rv = hn::Set(d, r);
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    auto h = hn::Mul(v.load(x + i), rv);
    if (scale != nullptr) h = hn::Mul(h, v.load(scale + i));
    v.store(h, y + i);
  });
  *inv_rms = r;
}

template <class T>
void RmsNormGrad(const T* dy, const T* x, const T* scale, T inv_rms, T* dx, T* dscale, int64_t n) {
  const Tag<T> d;
  const auto r = hn::Set(d, inv_rms);
  auto sum_gh = hn::Zero(d);
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    const auto out = v.load(dy + i);
    const auto h = hn::Mul(v.load(x + i), r);
    const auto g = scale != nullptr ? hn::Mul(out, v.load(scale + i)) : out;
    sum_gh = hn::MulAdd(g, h, sum_gh);
    if (dscale != nullptr) v.store(hn::MulAdd(out, h, v.load(dscale + i)), dscale + i);
  });
  if (dx == nullptr) return;
  const auto mean_gh = hn::Set(d, hn::GetLane(hn::SumOfLanes(d, sum_gh)) / static_cast<T>(n));
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    const auto out = v.load(dy + i);
    const auto h = hn::Mul(v.load(x + i), r);
    const auto g = scale != nullptr ? hn::Mul(out, v.load(scale + i)) : out;
    v.store(hn::Mul(r, hn::NegMulAdd(h, mean_gh, g)), dx + i);
  });
}

template <class T>
RowOps<T> Ops() {
  RowOps<T> ops;
  ops.sum = Sum<T>;
  ops.max = Max<T>;
  ops.dot = Dot<T>;
  ops.add = Add<T>;
  ops.axpy = Axpy<T>;
  ops.scale = Scale<T>;
  ops.multiply = Multiply<T>;
  ops.exp_shifted = ExpShifted<T>;
  ops.sum_exp_shifted = SumExpShifted<T>;
  ops.softmax = Softmax<T>;
  ops.log_softmax = LogSoftmax<T>;
  ops.softmax_grad = SoftmaxGrad<T>;
  ops.log_softmax_grad = LogSoftmaxGrad<T>;
  ops.exp_affine = ExpAffine<T>;
  ops.layer_norm = LayerNorm<T>;
  ops.layer_norm_grad = LayerNormGrad<T>;
  ops.rms_norm = RmsNorm<T>;
  ops.rms_norm_grad = RmsNormGrad<T>;
  return ops;
}

RowOps<float> OpsF32() { return Ops<float>(); }
RowOps<double> OpsF64() { return Ops<double>(); }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace ortrain::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ortrain::cpu {

HWY_EXPORT(OpsF32);
RowOps<float> row_ops_f32() { return HWY_DYNAMIC_DISPATCH(OpsF32)(); }

HWY_EXPORT(OpsF64);
RowOps<double> row_ops_f64() { return HWY_DYNAMIC_DISPATCH(OpsF64)(); }

}  // namespace ortrain::cpu
#endif  // HWY_ONCE
