// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Loops over a row in whole vectors and one partial one, with the same body for both.

#if defined(ORTRAIN_CPU_SIMD_ROW_LOOP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ORTRAIN_CPU_SIMD_ROW_LOOP_INL_H_
#undef ORTRAIN_CPU_SIMD_ROW_LOOP_INL_H_
#else
#define ORTRAIN_CPU_SIMD_ROW_LOOP_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ortrain::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Access to a whole vector.
template <class D>
struct WholeVector {
  using T = hn::TFromD<D>;
  using V = hn::Vec<D>;
  D d;
  HWY_INLINE V load(const T* p) const { return hn::LoadU(d, p); }
  HWY_INLINE void store(V v, T* p) const { hn::StoreU(v, d, p); }
  // `v` in the lanes that exist, `other` elsewhere.
  HWY_INLINE V valid_or(V v, V) const { return v; }
};

// Access to the first lanes of a vector; the others read as zero and are not written.
template <class D>
struct PartVector {
  using T = hn::TFromD<D>;
  using V = hn::Vec<D>;
  D d;
  hn::Mask<D> mask;
  HWY_INLINE V load(const T* p) const { return hn::MaskedLoad(mask, d, p); }
  HWY_INLINE void store(V v, T* p) const { hn::BlendedStore(v, mask, d, p); }
  HWY_INLINE V valid_or(V v, V other) const { return hn::IfThenElse(mask, v, other); }
};

// body(i, access) for i = 0, lanes, 2 lanes, ...
template <class D, class Body>
HWY_INLINE void ForVectors(D d, int64_t n, Body body) {
  constexpr int64_t kLanes = HWY_LANES(hn::TFromD<D>);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, WholeVector<D>{d});
  if (i < n) body(i, PartVector<D>{d, hn::FirstN(d, static_cast<size_t>(n - i))});
}

}  // namespace HWY_NAMESPACE
}  // namespace ortrain::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
