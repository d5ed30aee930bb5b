// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/simd/channel_rows.h"

#include "ortrain/cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ortrain/cpu/simd/channel_rows.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "ortrain/cpu/simd/row_loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ortrain::cpu {
namespace HWY_NAMESPACE {
namespace {

using Wide = hn::ScalableTag<double>;
using WideVec = hn::Vec<Wide>;

HWY_INLINE WideVec LoadWide(Wide d, const float* x) {
  return hn::PromoteTo(d, hn::LoadU(hn::Rebind<float, Wide>(), x));
}
HWY_INLINE WideVec LoadWide(Wide d, const double* x) { return hn::LoadU(d, x); }

// The sum of a row's terms, in four accumulators; single elements at the end.
// vector(i, sum) adds a vector of terms from element i on, scalar(i) is the term of one element.
template <class Vector, class Scalar>
HWY_INLINE double SumRow(int64_t n, Vector vector, Scalar scalar) {
  const Wide d;
  constexpr int64_t kLanes = HWY_LANES(double);
  auto a = hn::Zero(d), b = a, c = a, e = a;
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    a = vector(i, a);
    b = vector(i + kLanes, b);
    c = vector(i + 2 * kLanes, c);
    e = vector(i + 3 * kLanes, e);
  }
  for (; i + kLanes <= n; i += kLanes) a = vector(i, a);
  double sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(a, b), hn::Add(c, e))));
  for (; i < n; ++i) sum += scalar(i);
  return sum;
}

template <class T>
double Sum(const T* x, int64_t n) {
  const Wide d;
  return SumRow(
      n, [&](int64_t i, WideVec sum) HWY_ATTR { return hn::Add(sum, LoadWide(d, x + i)); },
      [&](int64_t i) { return static_cast<double>(x[i]); });
}

template <class T>
double SquaredDistance(const T* x, double mean, int64_t n) {
  const Wide d;
  const auto m = hn::Set(d, mean);
  return SumRow(
      n,
      [&](int64_t i, WideVec sum) HWY_ATTR {
        const auto distance = hn::Sub(LoadWide(d, x + i), m);
        return hn::MulAdd(distance, distance, sum);
      },
      [&](int64_t i) {
        const double distance = static_cast<double>(x[i]) - mean;
        return distance * distance;
      });
}

template <class T>
void GradientSums(const T* dy, const T* x, double mean, int64_t n, double* plain,
                  double* centred) {
  const Wide d;
  constexpr int64_t kLanes = HWY_LANES(double);
  const auto m = hn::Set(d, mean);
  auto p0 = hn::Zero(d), p1 = p0, c0 = p0, c1 = p0;
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const auto g0 = LoadWide(d, dy + i);
    const auto g1 = LoadWide(d, dy + i + kLanes);
    p0 = hn::Add(p0, g0);
    p1 = hn::Add(p1, g1);
    c0 = hn::MulAdd(g0, hn::Sub(LoadWide(d, x + i), m), c0);
    c1 = hn::MulAdd(g1, hn::Sub(LoadWide(d, x + i + kLanes), m), c1);
  }
  double p = hn::GetLane(hn::SumOfLanes(d, hn::Add(p0, p1)));
  double c = hn::GetLane(hn::SumOfLanes(d, hn::Add(c0, c1)));
  for (; i < n; ++i) {
    p += static_cast<double>(dy[i]);
    c += static_cast<double>(dy[i]) * (static_cast<double>(x[i]) - mean);
  }
  *plain += p;
  *centred += c;
}

template <class T>
void Affine(const T* x, T mean, T factor, T shift, T* y, int64_t n) {
  const hn::ScalableTag<T> d;
  const auto m = hn::Set(d, mean), f = hn::Set(d, factor), s = hn::Set(d, shift);
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    v.store(hn::MulAdd(hn::Sub(v.load(x + i), m), f, s), y + i);
  });
}

template <class T>
void InputGradient(const T* dy, const T* x, T mean, T factor, T slope, T shift, T* dx, int64_t n) {
  const hn::ScalableTag<T> d;
  const auto m = hn::Set(d, mean), f = hn::Set(d, factor);
  const auto k = hn::Set(d, slope), s = hn::Set(d, shift);
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    const auto centred = hn::MulAdd(hn::Sub(v.load(x + i), m), k, s);
    v.store(hn::MulAdd(v.load(dy + i), f, centred), dx + i);
  });
}

template <class T>
ChannelRows<T> Rows() {
  return {Sum<T>, SquaredDistance<T>, GradientSums<T>, Affine<T>, InputGradient<T>};
}
ChannelRows<float> RowsF32() { return Rows<float>(); }
ChannelRows<double> RowsF64() { return Rows<double>(); }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace ortrain::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ortrain::cpu {

HWY_EXPORT(RowsF32);
HWY_EXPORT(RowsF64);

template <>
ChannelRows<float> channel_rows<float>() {
  return HWY_DYNAMIC_DISPATCH(RowsF32)();
}
template <>
ChannelRows<double> channel_rows<double>() {
  return HWY_DYNAMIC_DISPATCH(RowsF64)();
}

}  // namespace ortrain::cpu
#endif  // HWY_ONCE
