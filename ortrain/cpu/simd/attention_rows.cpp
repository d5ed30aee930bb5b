// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/simd/attention_rows.h"

#include <limits>

#include "ortrain/cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ortrain/cpu/simd/attention_rows.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "ortrain/cpu/simd/math-inl.h"
#include "ortrain/cpu/simd/row_loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ortrain::cpu {
namespace HWY_NAMESPACE {
namespace {

float MaskMax(float* s, const float* mask, int64_t n) {
  const hn::ScalableTag<float> d;
  const auto lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  auto max = lowest;
  if (mask == nullptr) {
    ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
      max = hn::Max(max, v.valid_or(v.load(s + i), lowest));
    });
  } else {
    ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
      const auto score = hn::Add(v.load(s + i), v.load(mask + i));
      v.store(score, s + i);
      max = hn::Max(max, v.valid_or(score, lowest));
    });
  }
  return hn::GetLane(hn::MaxOfLanes(d, max));
}

void Gradient(float* s, float* dp, const float* mask, const float* factor, float lse, float delta,
              int64_t n) {
  const hn::ScalableTag<float> d;
  const auto l = hn::Set(d, lse);
  const auto del = hn::Set(d, delta);
  ForVectors(d, n, [&](int64_t i, auto v) HWY_ATTR {
    auto score = v.load(s + i);
    if (mask != nullptr) score = hn::Add(score, v.load(mask + i));
    const auto p = Exp(d, hn::Sub(score, l));
    auto g = v.load(dp + i);
    auto kept = p;
    if (factor != nullptr) {
      const auto f = v.load(factor + i);
      g = hn::Mul(g, f);
      kept = hn::Mul(p, f);
    }
    v.store(hn::Mul(p, hn::Sub(g, del)), dp + i);
    v.store(kept, s + i);
  });
}

AttentionRows Rows() { return {MaskMax, Gradient}; }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace ortrain::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ortrain::cpu {

HWY_EXPORT(Rows);
AttentionRows attention_rows() { return HWY_DYNAMIC_DISPATCH(Rows)(); }

}  // namespace ortrain::cpu
#endif  // HWY_ONCE
