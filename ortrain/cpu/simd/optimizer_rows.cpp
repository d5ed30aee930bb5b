// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/simd/optimizer_rows.h"

#include <cstring>
#include <type_traits>

#include "ortrain/cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ortrain/cpu/simd/optimizer_rows.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ortrain::cpu {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// body(rows, i) for every vector of the rows, of which the first kRead are only read. The last,
// partial one goes through a padded copy: other threads may write what follows a tensor.
template <int kRead, int kRows, class D, class Body, class T = hn::TFromD<D>>
HWY_INLINE void ForRows(D d, T* const (&rows)[kRows], int64_t n, const Body& body) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(rows, i);
  if (i == n) return;
  HWY_ALIGN T padded[kRows][HWY_MAX_BYTES / sizeof(T)] = {};
  T* copies[kRows];
  const size_t bytes = static_cast<size_t>(n - i) * sizeof(T);
  for (int r = 0; r < kRows; ++r) {
    copies[r] = padded[r];
    std::memcpy(padded[r], rows[r] + i, bytes);
  }
  body(copies, 0);
  for (int r = kRead; r < kRows; ++r) std::memcpy(rows[r] + i, padded[r], bytes);
}

template <class D>
HWY_INLINE hn::Vec<D> Constant(D d, double value) {
  return hn::Set(d, static_cast<hn::TFromD<D>>(value));
}

// The moments of Adam and LAMB, the mean by the formula of torch.lerp: from the end that is nearer,
// so that with beta1 = 0 it is the gradient, however small beside what was there.
template <class D>
struct Moments {
  using T = hn::TFromD<D>;
  using V = hn::Vec<D>;
  D d;
  bool is_near_gradient;
  V keep1, gain1, keep2, gain2;

  HWY_INLINE Moments(D tag, double beta1, double beta2)
      : d(tag),
        is_near_gradient(1 - beta1 >= 0.5),
        keep1(Constant(tag, beta1)),
        gain1(Constant(tag, 1 - beta1)),
        keep2(Constant(tag, beta2)),
        gain2(Constant(tag, 1 - beta2)) {}

  HWY_INLINE void Update(V g, T* mean, T* square, V& m, V& v) const {
    const V before = hn::LoadU(d, mean);
    const V apart = hn::Sub(g, before);
    m = is_near_gradient ? hn::NegMulAdd(keep1, apart, g) : hn::MulAdd(gain1, apart, before);
    v = hn::MulAdd(hn::Mul(g, g), gain2, hn::Mul(keep2, hn::LoadU(d, square)));
    hn::StoreU(m, d, mean);
    hn::StoreU(v, d, square);
  }
};

// Rows: gradient, parameter, exp_avg, exp_avg_sq, and max_exp_avg_sq with AMSGrad.
template <bool kMaximum, bool kL2, class D>
struct AdamBody {
  using T = hn::TFromD<D>;
  using V = hn::Vec<D>;
  D d;
  Moments<D> moments;
  V factor, l2, step_size, root_scale, epsilon, keep_before, keep_after;

  HWY_INLINE AdamBody(D tag, const AdamCoefficients& c)
      : d(tag),
        moments(tag, c.beta1, c.beta2),
        factor(Constant(tag, c.gradient_factor)),
        l2(Constant(tag, c.l2)),
        step_size(Constant(tag, c.step_size)),
        root_scale(Constant(tag, c.root_scale)),
        epsilon(Constant(tag, c.epsilon)),
        keep_before(Constant(tag, c.keep_before)),
        keep_after(Constant(tag, c.keep_after)) {}

  template <int kRows>
  HWY_INLINE void operator()(T* const (&rows)[kRows], int64_t i) const {
    V g = hn::Mul(hn::LoadU(d, rows[0] + i), factor);
    const V p = hn::LoadU(d, rows[1] + i);
    if constexpr (kL2) g = hn::MulAdd(l2, p, g);
    V m, v;
    moments.Update(g, rows[2] + i, rows[3] + i, m, v);
    if constexpr (kMaximum) {
      const V most = hn::LoadU(d, rows[4] + i);
      // A NaN of v goes in; a NaN already there is less than nothing and stays.
      v = hn::IfThenElse(hn::Or(hn::Gt(v, most), hn::IsNaN(v)), v, most);
      hn::StoreU(v, d, rows[4] + i);
    }
    const V divisor = hn::MulAdd(hn::Sqrt(v), root_scale, epsilon);
    const V moved = hn::NegMulAdd(step_size, hn::Div(m, divisor), hn::Mul(keep_before, p));
    hn::StoreU(hn::Mul(keep_after, moved), d, rows[1] + i);
  }
};

template <bool kMaximum, class T, int kRows>
HWY_INLINE void Adam(const AdamCoefficients& c, T* const (&rows)[kRows], int64_t n) {
  const hn::ScalableTag<T> d;
  if (c.l2 == 0) {
    ForRows<1>(d, rows, n, AdamBody<kMaximum, false, decltype(d)>(d, c));
  } else {
    ForRows<1>(d, rows, n, AdamBody<kMaximum, true, decltype(d)>(d, c));
  }
}

template <class T>
HWY_INLINE void AdamRow(const AdamCoefficients& c, const T* grad, T* param, T* exp_avg,
                        T* exp_avg_sq, T* max_exp_avg_sq, int64_t n) {
  T* g = const_cast<T*>(grad);
  if (max_exp_avg_sq == nullptr) {
    T* const rows[] = {g, param, exp_avg, exp_avg_sq};
    Adam<false>(c, rows, n);
  } else {
    T* const rows[] = {g, param, exp_avg, exp_avg_sq, max_exp_avg_sq};
    Adam<true>(c, rows, n);
  }
}

// Rows: gradient, parameter, and the buffer with momentum.
template <bool kL2, bool kNesterov, class D>
struct SgdBody {
  using T = hn::TFromD<D>;
  using V = hn::Vec<D>;
  D d;
  V factor, l2, lr, momentum, keep, gain;

  HWY_INLINE SgdBody(D tag, const SgdCoefficients& c)
      : d(tag),
        factor(Constant(tag, c.gradient_factor)),
        l2(Constant(tag, c.l2)),
        lr(Constant(tag, c.lr)),
        momentum(Constant(tag, c.momentum)),
        keep(Constant(tag, c.buffer_keep)),
        gain(Constant(tag, c.buffer_gain)) {}

  template <int kRows>
  HWY_INLINE void operator()(T* const (&rows)[kRows], int64_t i) const {
    V g = hn::Mul(hn::LoadU(d, rows[0] + i), factor);
    const V p = hn::LoadU(d, rows[1] + i);
    if constexpr (kL2) g = hn::MulAdd(l2, p, g);
    if constexpr (kRows == 3) {
      const V b = hn::MulAdd(gain, g, hn::Mul(keep, hn::LoadU(d, rows[2] + i)));
      hn::StoreU(b, d, rows[2] + i);
      g = kNesterov ? hn::MulAdd(momentum, b, g) : b;
    }
    hn::StoreU(hn::NegMulAdd(lr, g, p), d, rows[1] + i);
  }
};

template <bool kL2, class T>
HWY_INLINE void Sgd(const SgdCoefficients& c, T* grad, T* param, T* buffer, int64_t n) {
  const hn::ScalableTag<T> d;
  using D = std::remove_const_t<decltype(d)>;
  if (buffer == nullptr) {
    T* const rows[] = {grad, param};
    ForRows<1>(d, rows, n, SgdBody<kL2, false, D>(d, c));
    return;
  }
  T* const rows[] = {grad, param, buffer};
  if (c.nesterov) {
    ForRows<1>(d, rows, n, SgdBody<kL2, true, D>(d, c));
  } else {
    ForRows<1>(d, rows, n, SgdBody<kL2, false, D>(d, c));
  }
}

template <class T>
HWY_INLINE void SgdRow(const SgdCoefficients& c, const T* grad, T* param, T* buffer, int64_t n) {
  T* g = const_cast<T*>(grad);
  if (c.l2 == 0) {
    Sgd<false>(c, g, param, buffer, n);
  } else {
    Sgd<true>(c, g, param, buffer, n);
  }
}

// Rows: gradient, parameter, sum of squares.
template <class D>
struct AdagradBody {
  using T = hn::TFromD<D>;
  using V = hn::Vec<D>;
  D d;
  V factor, l2, lr, epsilon;

  HWY_INLINE AdagradBody(D tag, const AdagradCoefficients& c)
      : d(tag),
        factor(Constant(tag, c.gradient_factor)),
        l2(Constant(tag, c.l2)),
        lr(Constant(tag, c.lr)),
        epsilon(Constant(tag, c.epsilon)) {}

  HWY_INLINE void operator()(T* const (&rows)[3], int64_t i) const {
    const V p = hn::LoadU(d, rows[1] + i);
    const V g = hn::MulAdd(l2, p, hn::Mul(hn::LoadU(d, rows[0] + i), factor));
    const V h = hn::MulAdd(g, g, hn::LoadU(d, rows[2] + i));
    hn::StoreU(h, d, rows[2] + i);
    const V direction = hn::Div(g, hn::Add(hn::Sqrt(h), epsilon));
    hn::StoreU(hn::NegMulAdd(lr, direction, p), d, rows[1] + i);
  }
};

template <class T>
HWY_INLINE void AdagradRow(const AdagradCoefficients& c, const T* grad, T* param, T* sum,
                           int64_t n) {
  const hn::ScalableTag<T> d;
  T* const rows[] = {const_cast<T*>(grad), param, sum};
  ForRows<1>(d, rows, n, AdagradBody<std::remove_const_t<decltype(d)>>(d, c));
}

template <class D>
struct LambUpdate {
  using V = hn::Vec<D>;
  V mean_scale, root_scale, epsilon, weight_decay;

  HWY_INLINE LambUpdate(D d, const LambCoefficients& c)
      : mean_scale(Constant(d, c.mean_scale)),
        root_scale(Constant(d, c.root_scale)),
        epsilon(Constant(d, c.epsilon)),
        weight_decay(Constant(d, c.weight_decay)) {}

  HWY_INLINE V operator()(V m, V v, V p) const {
    const V divisor = hn::MulAdd(hn::Sqrt(v), root_scale, epsilon);
    return hn::MulAdd(weight_decay, p, hn::Div(hn::Mul(m, mean_scale), divisor));
  }
};

// Rows: gradient, parameter, exp_avg, exp_avg_sq, update.
template <class D>
struct LambMomentsBody {
  using T = hn::TFromD<D>;
  using V = hn::Vec<D>;
  D d;
  Moments<D> moments;
  LambUpdate<D> update;
  V factor;

  HWY_INLINE LambMomentsBody(D tag, const LambCoefficients& c)
      : d(tag),
        moments(tag, c.beta1, c.beta2),
        update(tag, c),
        factor(Constant(tag, c.gradient_factor)) {}

  HWY_INLINE void operator()(T* const (&rows)[5], int64_t i) const {
    V m, v;
    moments.Update(hn::Mul(hn::LoadU(d, rows[0] + i), factor), rows[2] + i, rows[3] + i, m, v);
    hn::StoreU(update(m, v, hn::LoadU(d, rows[1] + i)), d, rows[4] + i);
  }
};

template <class T>
HWY_INLINE void LambMomentsRow(const LambCoefficients& c, const T* grad, const T* param, T* exp_avg,
                               T* exp_avg_sq, T* update, int64_t n) {
  const hn::ScalableTag<T> d;
  T* const rows[] = {const_cast<T*>(grad), const_cast<T*>(param), exp_avg, exp_avg_sq, update};
  ForRows<2>(d, rows, n, LambMomentsBody<std::remove_const_t<decltype(d)>>(d, c));
}

// Rows: exp_avg, exp_avg_sq, parameter.
template <class D>
struct LambApplyBody {
  using T = hn::TFromD<D>;
  using V = hn::Vec<D>;
  D d;
  LambUpdate<D> update;
  V rate;

  HWY_INLINE LambApplyBody(D tag, const LambCoefficients& c, double rate_of_tensor)
      : d(tag), update(tag, c), rate(Constant(tag, rate_of_tensor)) {}

  HWY_INLINE void operator()(T* const (&rows)[3], int64_t i) const {
    const V p = hn::LoadU(d, rows[2] + i);
    const V u = update(hn::LoadU(d, rows[0] + i), hn::LoadU(d, rows[1] + i), p);
    hn::StoreU(hn::NegMulAdd(rate, u, p), d, rows[2] + i);
  }
};

template <class T>
HWY_INLINE void LambApplyRow(const LambCoefficients& c, double rate, const T* exp_avg,
                             const T* exp_avg_sq, T* param, int64_t n) {
  const hn::ScalableTag<T> d;
  T* const rows[] = {const_cast<T*>(exp_avg), const_cast<T*>(exp_avg_sq), param};
  ForRows<2>(d, rows, n, LambApplyBody<std::remove_const_t<decltype(d)>>(d, c, rate));
}

template <class T>
HWY_INLINE double SumSquaresRow(const T* x, int64_t n) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<T, decltype(d)> narrow;
  using V = hn::Vec<decltype(d)>;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto load = [&](const T* from) HWY_ATTR {
    if constexpr (std::is_same_v<T, double>) {
      return hn::LoadU(narrow, from);
    } else {
      return hn::PromoteTo(d, hn::LoadU(narrow, from));
    }
  };
  V sums[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    for (int k = 0; k < 4; ++k) {
      const V value = load(x + i + k * lanes);
      sums[k] = hn::MulAdd(value, value, sums[k]);
    }
  }
  for (; i + lanes <= n; i += lanes) {
    const V value = load(x + i);
    sums[0] = hn::MulAdd(value, value, sums[0]);
  }
  HWY_ALIGN double joined[HWY_MAX_BYTES / sizeof(double)];
  hn::Store(hn::Add(hn::Add(sums[0], sums[1]), hn::Add(sums[2], sums[3])), d, joined);
  double total = 0;
  for (int64_t j = 0; j < lanes; ++j) total += joined[j];
  for (; i < n; ++i) total += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return total;
}

void AdamF32(const AdamCoefficients& c, const float* g, float* p, float* m, float* v, float* x,
             int64_t n) {
  AdamRow(c, g, p, m, v, x, n);
}
void AdamF64(const AdamCoefficients& c, const double* g, double* p, double* m, double* v, double* x,
             int64_t n) {
  AdamRow(c, g, p, m, v, x, n);
}
void SgdF32(const SgdCoefficients& c, const float* g, float* p, float* b, int64_t n) {
  SgdRow(c, g, p, b, n);
}
void SgdF64(const SgdCoefficients& c, const double* g, double* p, double* b, int64_t n) {
  SgdRow(c, g, p, b, n);
}
void AdagradF32(const AdagradCoefficients& c, const float* g, float* p, float* h, int64_t n) {
  AdagradRow(c, g, p, h, n);
}
void AdagradF64(const AdagradCoefficients& c, const double* g, double* p, double* h, int64_t n) {
  AdagradRow(c, g, p, h, n);
}
void LambMomentsF32(const LambCoefficients& c, const float* g, const float* p, float* m, float* v,
                    float* u, int64_t n) {
  LambMomentsRow(c, g, p, m, v, u, n);
}
void LambMomentsF64(const LambCoefficients& c, const double* g, const double* p, double* m,
                    double* v, double* u, int64_t n) {
  LambMomentsRow(c, g, p, m, v, u, n);
}
void LambApplyF32(const LambCoefficients& c, double rate, const float* m, const float* v, float* p,
                  int64_t n) {
  LambApplyRow(c, rate, m, v, p, n);
}
void LambApplyF64(const LambCoefficients& c, double rate, const double* m, const double* v,
                  double* p, int64_t n) {
  LambApplyRow(c, rate, m, v, p, n);
}
double SumSquaresF32(const float* x, int64_t n) { return SumSquaresRow(x, n); }
double SumSquaresF64(const double* x, int64_t n) { return SumSquaresRow(x, n); }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace ortrain::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ortrain::cpu {

HWY_EXPORT(AdamF32);
HWY_EXPORT(AdamF64);
HWY_EXPORT(SgdF32);
HWY_EXPORT(SgdF64);
HWY_EXPORT(AdagradF32);
HWY_EXPORT(AdagradF64);
HWY_EXPORT(LambMomentsF32);
HWY_EXPORT(LambMomentsF64);
HWY_EXPORT(LambApplyF32);
HWY_EXPORT(LambApplyF64);
HWY_EXPORT(SumSquaresF32);
HWY_EXPORT(SumSquaresF64);

template <>
void adam_row(const AdamCoefficients& c, const float* g, float* p, float* m, float* v, float* x,
              int64_t n) {
  HWY_DYNAMIC_DISPATCH(AdamF32)(c, g, p, m, v, x, n);
}
template <>
void adam_row(const AdamCoefficients& c, const double* g, double* p, double* m, double* v,
              double* x, int64_t n) {
  HWY_DYNAMIC_DISPATCH(AdamF64)(c, g, p, m, v, x, n);
}
template <>
void sgd_row(const SgdCoefficients& c, const float* g, float* p, float* b, int64_t n) {
  HWY_DYNAMIC_DISPATCH(SgdF32)(c, g, p, b, n);
}
template <>
void sgd_row(const SgdCoefficients& c, const double* g, double* p, double* b, int64_t n) {
  HWY_DYNAMIC_DISPATCH(SgdF64)(c, g, p, b, n);
}
template <>
void adagrad_row(const AdagradCoefficients& c, const float* g, float* p, float* h, int64_t n) {
  HWY_DYNAMIC_DISPATCH(AdagradF32)(c, g, p, h, n);
}
template <>
void adagrad_row(const AdagradCoefficients& c, const double* g, double* p, double* h, int64_t n) {
  HWY_DYNAMIC_DISPATCH(AdagradF64)(c, g, p, h, n);
}
template <>
void lamb_moments_row(const LambCoefficients& c, const float* g, const float* p, float* m, float* v,
                      float* u, int64_t n) {
  HWY_DYNAMIC_DISPATCH(LambMomentsF32)(c, g, p, m, v, u, n);
}
template <>
void lamb_moments_row(const LambCoefficients& c, const double* g, const double* p, double* m,
                      double* v, double* u, int64_t n) {
  HWY_DYNAMIC_DISPATCH(LambMomentsF64)(c, g, p, m, v, u, n);
}
template <>
void lamb_apply_row(const LambCoefficients& c, double rate, const float* m, const float* v,
                    float* p, int64_t n) {
  HWY_DYNAMIC_DISPATCH(LambApplyF32)(c, rate, m, v, p, n);
}
template <>
void lamb_apply_row(const LambCoefficients& c, double rate, const double* m, const double* v,
                    double* p, int64_t n) {
  HWY_DYNAMIC_DISPATCH(LambApplyF64)(c, rate, m, v, p, n);
}
template <>
double sum_squares_row(const float* x, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(SumSquaresF32)(x, n);
}
template <>
double sum_squares_row(const double* x, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(SumSquaresF64)(x, n);
}

}  // namespace ortrain::cpu
#endif  // HWY_ONCE
