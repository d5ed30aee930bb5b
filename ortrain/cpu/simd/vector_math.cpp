// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/simd/vector_math.h"

#include "ortrain/cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ortrain/cpu/simd/vector_math.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "ortrain/cpu/simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ortrain::cpu {
namespace HWY_NAMESPACE {
namespace {

template <class T, class F>
HWY_INLINE void Map(const T* x, T* y, int64_t n, F f) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(f(d, hn::LoadU(d, x + i)), d, y + i);
  if (i < n) {
    HWY_ALIGN T buffer[HWY_MAX_BYTES / sizeof(T)] = {};
    for (int64_t j = i; j < n; ++j) buffer[j - i] = x[j];
    hn::Store(f(d, hn::Load(d, buffer)), d, buffer);
    for (int64_t j = i; j < n; ++j) y[j] = buffer[j - i];
  }
}

#define ORTRAIN_VECTOR_FUNCTION(name, function)                           \
  void name##F32(const float* x, float* y, int64_t n) {                   \
    Map(x, y, n, [](auto d, auto v) HWY_ATTR { return function(d, v); }); \
  }                                                                       \
  void name##F64(const double* x, double* y, int64_t n) {                 \
    Map(x, y, n, [](auto d, auto v) HWY_ATTR { return function(d, v); }); \
  }
ORTRAIN_VECTOR_FUNCTION(VectorExp, Exp)
ORTRAIN_VECTOR_FUNCTION(VectorExpm1, Expm1)
ORTRAIN_VECTOR_FUNCTION(VectorLog, Log)
ORTRAIN_VECTOR_FUNCTION(VectorLog1p, Log1p)
ORTRAIN_VECTOR_FUNCTION(VectorTanh, Tanh)
ORTRAIN_VECTOR_FUNCTION(VectorSigmoid, Sigmoid)
ORTRAIN_VECTOR_FUNCTION(VectorErf, Erf)
#undef ORTRAIN_VECTOR_FUNCTION

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace ortrain::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ortrain::cpu {

#define ORTRAIN_VECTOR_FUNCTION(name, target)                                                    \
  HWY_EXPORT(target##F32);                                                                       \
  HWY_EXPORT(target##F64);                                                                       \
  void name(const float* x, float* y, int64_t n) { HWY_DYNAMIC_DISPATCH(target##F32)(x, y, n); } \
  void name(const double* x, double* y, int64_t n) { HWY_DYNAMIC_DISPATCH(target##F64)(x, y, n); }
ORTRAIN_VECTOR_FUNCTION(vector_exp, VectorExp)
ORTRAIN_VECTOR_FUNCTION(vector_expm1, VectorExpm1)
ORTRAIN_VECTOR_FUNCTION(vector_log, VectorLog)
ORTRAIN_VECTOR_FUNCTION(vector_log1p, VectorLog1p)
ORTRAIN_VECTOR_FUNCTION(vector_tanh, VectorTanh)
ORTRAIN_VECTOR_FUNCTION(vector_sigmoid, VectorSigmoid)
ORTRAIN_VECTOR_FUNCTION(vector_erf, VectorErf)
#undef ORTRAIN_VECTOR_FUNCTION

}  // namespace ortrain::cpu
#endif  // HWY_ONCE
