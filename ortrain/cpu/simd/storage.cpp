// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/storage.h"

#include <bit>

#include "ortrain/base/half.h"
#include "ortrain/cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ortrain/cpu/simd/storage.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ortrain::cpu {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_SCALAR
constexpr int64_t kLanes = 0;
#else
constexpr int64_t kLanes = HWY_MAX_BYTES / sizeof(float);
#endif

void WidenRun(Storage storage, const uint16_t* in, float* out, int64_t n) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::ScalableTag<float> df;
  if (storage == Storage::kBF16) {
    const hn::RebindToUnsigned<decltype(df)> du;
    const hn::Rebind<uint16_t, decltype(df)> d16;
    for (; i + kLanes <= n; i += kLanes) {
      const auto bits = hn::PromoteTo(du, hn::LoadU(d16, in + i));
      hn::StoreU(hn::BitCast(df, hn::ShiftLeft<16>(bits)), df, out + i);
    }
  } else {
    const hn::Rebind<uint16_t, decltype(df)> d16;
    const hn::Rebind<hwy::float16_t, decltype(df)> dh;
    for (; i + kLanes <= n; i += kLanes) {
      hn::StoreU(hn::PromoteTo(df, hn::BitCast(dh, hn::LoadU(d16, in + i))), df, out + i);
    }
  }
#endif
  for (; i < n; ++i) {
    out[i] = storage == Storage::kBF16 ? float{std::bit_cast<BFloat16>(in[i])}
                                       : float{std::bit_cast<Float16>(in[i])};
  }
}

void NarrowRun(Storage storage, const float* in, uint16_t* out, int64_t n) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::ScalableTag<float> df;
  const hn::Rebind<uint16_t, decltype(df)> d16;
  if (storage == Storage::kBF16) {
    const hn::RebindToUnsigned<decltype(df)> du;
    const hn::RebindToSigned<decltype(df)> di;
    for (; i + kLanes <= n; i += kLanes) {
      const auto value = hn::LoadU(df, in + i);
      const auto bits = hn::BitCast(du, value);
      const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
      const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFu)), odd));
      const auto nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40u));
      const auto is_nan = hn::RebindMask(du, hn::IsNaN(value));
      const auto result = hn::IfThenElse(is_nan, nan, rounded);
      hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, result)), d16, out + i);
    }
  } else {
    const hn::Rebind<hwy::float16_t, decltype(df)> dh;
    for (; i + kLanes <= n; i += kLanes) {
      hn::StoreU(hn::BitCast(d16, hn::DemoteTo(dh, hn::LoadU(df, in + i))), d16, out + i);
    }
  }
#endif
  for (; i < n; ++i) {
    out[i] = storage == Storage::kBF16 ? BFloat16(in[i]).bits : Float16(in[i]).bits;
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace ortrain::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ortrain::cpu {

HWY_EXPORT(WidenRun);
void widen(Storage storage, const uint16_t* in, float* out, int64_t n) {
  HWY_DYNAMIC_DISPATCH(WidenRun)(storage, in, out, n);
}

HWY_EXPORT(NarrowRun);
void narrow(Storage storage, const float* in, uint16_t* out, int64_t n) {
  HWY_DYNAMIC_DISPATCH(NarrowRun)(storage, in, out, n);
}

}  // namespace ortrain::cpu
#endif  // HWY_ONCE
