// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Elementary functions on Highway vectors of float and double, within a few ulp over the whole
// range; infinities, NaN and signed zero follow the C library. Coefficients are minimax fits
// (Remez exchange) of the functions named beside them.

#if defined(ORTRAIN_CPU_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ORTRAIN_CPU_SIMD_MATH_INL_H_
#undef ORTRAIN_CPU_SIMD_MATH_INL_H_
#else
#define ORTRAIN_CPU_SIMD_MATH_INL_H_
#endif

#include <cstdint>
#include <limits>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ortrain::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// c[0] + x * (c[1] + x * (c[2] + ...)).
template <class D, class V, class T, size_t N>
HWY_INLINE V Horner(D d, V x, const T (&c)[N]) {
  V sum = hn::Set(d, c[N - 1]);
  for (size_t i = N - 1; i-- > 0;) sum = hn::MulAdd(sum, x, hn::Set(d, c[i]));
  return sum;
}

// Per-type constants of the argument reductions.
template <class T>
struct MathConstants;

template <>
struct MathConstants<float> {
  static constexpr int kMantissaBits = 23;
  static constexpr int kBias = 127;
  static constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23
  static constexpr float kExpLowest = -104.0f;       // below: 0
  static constexpr float kExpHighest = 89.0f;        // above: infinity
  static constexpr float kLn2High = 0x1.62e4p-1f;    // low bits zero: n * kLn2High is exact
  static constexpr float kLn2Low = 0x1.7f7d1cp-20f;
  static constexpr float kTanhSaturated = 10.0f;
  static constexpr float kErfSaturated = 4.0f;
  // (exp(r) - 1 - r) / r^2 on [-ln2/2, ln2/2].
  static constexpr float kExp[] = {0.500000002693f, 0.166665770025f, 0.0416663752722f,
                                   0.00836317591475f, 0.00139411118309f};
  // 2 (atanh(s) / s - 1) / s^2 in s^2, |s| <= (sqrt2 - 1) / (sqrt2 + 1).
  static constexpr float kLog[] = {0.666666665531f, 0.400001227149f, 0.285507413975f,
                                   0.233322677512f};
  // erf(x) / x in x^2, |x| <= 1.
  static constexpr float kErf[] = {1.12837916573f,    -0.376126258251f,  0.112835851507f,
                                   -0.0268538118464f, 0.00518832731952f, -0.000801018924727f,
                                   7.8538440459e-5f};
  // log(erfc(x)), 1 <= x <= 4, error weighted by erfc(x).
  static constexpr float kLogErfc[] = {-0.000353717681979f, -1.1270400395f,   -0.638225678728f,
                                       -0.103037360415f,    0.0218053106092f, -0.00293960436099f,
                                       0.000185573598998f};
};

template <>
struct MathConstants<double> {
  static constexpr int kMantissaBits = 52;
  static constexpr int kBias = 1023;
  static constexpr double kRoundMagic = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kExpLowest = -746.0;
  static constexpr double kExpHighest = 710.0;
  static constexpr double kLn2High = 0x1.62e42fefap-1;
  static constexpr double kLn2Low = 0x1.cf79abc9e3b3ap-40;
  static constexpr double kTanhSaturated = 20.0;
  static constexpr double kErfSaturated = 6.0;
  static constexpr double kExp[] = {0.50000000000000010214,     0.16666666666666674522,
                                    0.041666666666624152926,    0.0083333333333222161965,
                                    0.0013888888917200456048,   0.00019841269886563801674,
                                    0.000024801521317390653471, 2.7557242367449657774e-6,
                                    2.7620077952243293271e-7,   2.5110038296727243219e-8};
  static constexpr double kLog[] = {0.66666666666666666462, 0.40000000000000886136,
                                    0.28571428570798629966, 0.22222222392730402984,
                                    0.18181795541390909022, 0.15386244625882071496,
                                    0.13268651440009639806, 0.13087807915317875804};
  static constexpr double kErf[] = {
      1.1283791670955125737,     -0.37612638903183747604,     0.11283791670954857469,
      -0.026866170645072891167,  0.0052239776247808346541,    -0.00085483269787405676193,
      0.00012055331036846668256, -0.000014925593505766363022, 1.6460972801190717729e-6,
      -1.6350025076223881226e-7, 1.4657878989888878528e-8,    -1.1365663136628493368e-9,
      5.9452576939415425229e-11};
  static constexpr double kLogErfc[] = {
      -2.9400112188656866264e-8,  -1.1283788993559855516,     -0.63662081254773591816,
      -0.10277058255471190212,    0.019127561510474536493,    0.00020304570905934318993,
      -0.0016758367806602295392,  0.00055316495709869778276,  0.000021417311028215554752,
      -0.00011043504964382044192, 0.000064595082973669713209, -0.000024216424624145562571,
      6.7644207738518860604e-6,   -1.4648479648221353643e-6,  2.4719999398489866231e-7,
      -3.2055451909499859338e-8,  3.0929033483169590191e-9,   -2.0935975584136062511e-10,
      8.8735089137864553176e-12,  -1.7716284032146338517e-13};
};

// x = n ln2 + r: returns r, its polynomial r + r^2 P(r) = expm1(r), and n as integer lanes.
template <class D, class V>
struct ExpReduced {
  V expm1;
  hn::Vec<hn::RebindToSigned<D>> n;
};

template <class D, class V>
HWY_INLINE ExpReduced<D, V> ReduceExp(D d, V x) {
  using T = hn::TFromD<D>;
  using C = MathConstants<T>;
  const hn::RebindToSigned<D> di;
  // Adding 1.5 * 2^mantissa rounds to the nearest integer and leaves it in the low bits.
  const V magic = hn::Set(d, C::kRoundMagic);
  const V rounded = hn::MulAdd(x, hn::Set(d, static_cast<T>(1.44269504088896340736)), magic);
  const V n = hn::Sub(rounded, magic);
  V r = hn::NegMulAdd(n, hn::Set(d, C::kLn2High), x);
  r = hn::NegMulAdd(n, hn::Set(d, C::kLn2Low), r);
  const V tail = Horner(d, r, C::kExp);
  return {hn::MulAdd(hn::Mul(r, r), tail, r),
          hn::Sub(hn::BitCast(di, rounded), hn::BitCast(di, magic))};
}

// 2^n for n inside the exponent range of normal numbers.
template <class D, class VI>
HWY_INLINE hn::Vec<D> PowerOfTwo(D d, VI n) {
  using T = hn::TFromD<D>;
  using C = MathConstants<T>;
  const hn::RebindToSigned<D> di;
  using TI = hn::TFromD<decltype(di)>;
  return hn::BitCast(
      d, hn::ShiftLeft<C::kMantissaBits>(hn::Add(n, hn::Set(di, static_cast<TI>(C::kBias)))));
}

template <class D, class V>
HWY_INLINE V Exp(D d, V x) {
  using C = MathConstants<hn::TFromD<D>>;
  const hn::RebindToSigned<D> di;
  // Compare-and-blend, not Min/Max, so that NaN survives on every target.
  const V low = hn::Set(d, C::kExpLowest);
  const V high = hn::Set(d, C::kExpHighest);
  x = hn::IfThenElse(hn::Lt(x, low), low, x);
  x = hn::IfThenElse(hn::Gt(x, high), high, x);
  const auto reduced = ReduceExp(d, x);
  // Two factors reach denormal results and infinity without overflow of the exponent field.
  // The lanes hold small integers, so a 64-bit arithmetic shift may be done on 32-bit halves.
  const auto half = [&]() HWY_ATTR {
    if constexpr (sizeof(hn::TFromD<D>) == 4) {
      return hn::ShiftRight<1>(reduced.n);
    } else {
      const auto offset = hn::Set(di, int64_t{4096});
      return hn::Sub(hn::BitCast(di, hn::ShiftRight<1>(hn::BitCast(hn::RebindToUnsigned<D>(),
                                                                   hn::Add(reduced.n, offset)))),
                     hn::Set(di, int64_t{2048}));
    }
  }();
  const V y = hn::Add(reduced.expm1, hn::Set(d, 1));
  return hn::Mul(hn::Mul(y, PowerOfTwo(d, half)), PowerOfTwo(d, hn::Sub(reduced.n, half)));
}

// exp(x) - 1 = 2^n expm1(r) + (2^n - 1), exact in r at n = 0; computed at half scale so that 2^n
// stays finite up to the overflow of the result.
template <class D, class V>
HWY_INLINE V Expm1(D d, V x) {
  using T = hn::TFromD<D>;
  using C = MathConstants<T>;
  const hn::RebindToSigned<D> di;
  const V low = hn::Set(d, static_cast<T>(-50));  // -1 to the last bit
  const V high = hn::Set(d, C::kExpHighest);
  V clamped = hn::IfThenElse(hn::Lt(x, low), low, x);
  clamped = hn::IfThenElse(hn::Gt(clamped, high), high, clamped);
  const auto reduced = ReduceExp(d, clamped);
  const V half_scale = PowerOfTwo(d, hn::Sub(reduced.n, hn::Set(di, 1)));
  const V half =
      hn::MulAdd(half_scale, reduced.expm1, hn::Sub(half_scale, hn::Set(d, static_cast<T>(0.5))));
  // Keeps the sign of zero, and denormals, whose half would round.
  const auto tiny =
      hn::Lt(hn::Abs(x), hn::Set(d, std::numeric_limits<T>::epsilon() / static_cast<T>(4)));
  return hn::IfThenElse(tiny, x, hn::Add(half, half));
}

// Natural logarithm; log(0) = -inf, log(negative) = NaN.
template <class D, class V>
HWY_INLINE V Log(D d, V x) {
  using T = hn::TFromD<D>;
  using C = MathConstants<T>;
  const hn::RebindToSigned<D> di;
  using TI = hn::TFromD<decltype(di)>;
  const V zero = hn::Zero(d);
  const V one = hn::Set(d, 1);
  const V infinity = hn::Set(d, std::numeric_limits<T>::infinity());

  // Denormals are lifted into the normal range.
  const auto denormal = hn::Lt(x, hn::Set(d, std::numeric_limits<T>::min()));
  const T lift = static_cast<T>(TI{1} << (C::kMantissaBits + 2));
  const V lifted = hn::IfThenElse(denormal, hn::Mul(x, hn::Set(d, lift)), x);

  // x = 2^e m with m in [sqrt(1/2), sqrt(2)): subtracting the bits of sqrt(1/2) makes the
  // exponent field of the difference the wanted e.
  constexpr TI kSqrtHalfBits =
      sizeof(T) == 4 ? static_cast<TI>(0x3f3504f3) : static_cast<TI>(0x3fe6a09e667f3bcdULL);
  constexpr TI kMantissaMask = (TI{1} << C::kMantissaBits) - 1;
  const auto offset = hn::Set(di, kSqrtHalfBits);
  const auto bits = hn::Sub(hn::BitCast(di, lifted), offset);
  const V m = hn::BitCast(d, hn::Add(hn::And(bits, hn::Set(di, kMantissaMask)), offset));
  // The biased field plus 1.5 * 2^mantissa, read as a number, converts e without 64-bit converts.
  const hn::RebindToUnsigned<D> du;
  const auto field = hn::BitCast(
      di, hn::ShiftRight<C::kMantissaBits>(hn::BitCast(
              du, hn::Add(bits, hn::Set(di, static_cast<TI>(C::kBias) << C::kMantissaBits)))));
  const V magic = hn::Set(d, C::kRoundMagic);
  V e = hn::Sub(hn::BitCast(d, hn::Add(field, hn::BitCast(di, magic))),
                hn::Set(d, C::kRoundMagic + static_cast<T>(C::kBias)));
  e = hn::Sub(e, hn::IfThenElseZero(denormal, hn::Set(d, static_cast<T>(C::kMantissaBits + 2))));

  const V f = hn::Sub(m, one);
  const V s = hn::Div(f, hn::Add(f, hn::Set(d, 2)));
  const V z = hn::Mul(s, s);
  const V r = hn::Mul(z, Horner(d, z, C::kLog));
  const V half_square = hn::Mul(hn::Mul(f, f), hn::Set(d, static_cast<T>(0.5)));
  // log(m) = f - (f^2/2 - s (f^2/2 + r)).
  const V low = hn::MulAdd(s, hn::Add(half_square, r), hn::Mul(e, hn::Set(d, C::kLn2Low)));
  V y = hn::MulAdd(e, hn::Set(d, C::kLn2High), hn::Sub(f, hn::Sub(half_square, low)));

  y = hn::IfThenElse(hn::Lt(x, infinity), y, x);  // +inf and NaN pass through
  y = hn::IfThenElse(hn::Eq(x, zero), hn::Neg(infinity), y);
  return hn::IfThenElse(hn::Lt(x, zero), hn::Set(d, std::numeric_limits<T>::quiet_NaN()), y);
}

// log(1 + x); the rounding of 1 + x is put back by x / ((1 + x) - 1).
template <class D, class V>
HWY_INLINE V Log1p(D d, V x) {
  using T = hn::TFromD<D>;
  const V one = hn::Set(d, 1);
  const V u = hn::Add(x, one);
  const V du = hn::Sub(u, one);
  const V y = hn::Mul(Log(d, u), hn::Div(x, du));
  const auto plain =
      hn::Or(hn::Eq(u, one), hn::Eq(x, hn::Set(d, std::numeric_limits<T>::infinity())));
  return hn::IfThenElse(plain, x, y);
}

template <class D, class V>
HWY_INLINE V Tanh(D d, V x) {
  using C = MathConstants<hn::TFromD<D>>;
  const V limit = hn::Set(d, C::kTanhSaturated);
  V a = hn::Abs(x);
  a = hn::IfThenElse(hn::Gt(a, limit), limit, a);
  const V e = Expm1(d, hn::Add(a, a));
  return hn::CopySign(hn::Div(e, hn::Add(e, hn::Set(d, 2))), x);
}

// 1 / (1 + exp(-x)), accurate in both tails.
template <class D, class V>
HWY_INLINE V Sigmoid(D d, V x) {
  const V one = hn::Set(d, 1);
  const V e = Exp(d, hn::Neg(hn::Abs(x)));
  const V numerator = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one);
  return hn::Div(numerator, hn::Add(one, e));
}

template <class D, class V>
HWY_INLINE V Erf(D d, V x) {
  using C = MathConstants<hn::TFromD<D>>;
  const V one = hn::Set(d, 1);
  const V limit = hn::Set(d, C::kErfSaturated);
  V a = hn::Abs(x);
  a = hn::IfThenElse(hn::Gt(a, limit), limit, a);
  const V near_zero = hn::Mul(a, Horner(d, hn::Mul(a, a), C::kErf));
  const V tail = hn::Sub(one, Exp(d, Horner(d, a, C::kLogErfc)));
  return hn::CopySign(hn::IfThenElse(hn::Lt(a, one), near_zero, tail), x);
}

}  // namespace HWY_NAMESPACE
}  // namespace ortrain::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
