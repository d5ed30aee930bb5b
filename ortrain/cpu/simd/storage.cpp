// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/storage.h"

#include <bit>
#include <cmath>

#include "ortrain/cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ortrain/cpu/simd/storage.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

#ifndef ORTRAIN_CPU_SIMD_STORAGE_SCALAR
#define ORTRAIN_CPU_SIMD_STORAGE_SCALAR
namespace ortrain::cpu {
namespace {

float widen_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

uint16_t narrow_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

float widen_f16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = (bits >> 10) & 0x1F;
  const uint32_t mantissa = bits & 0x3FF;
  if (exponent == 0x1F) {
    const uint32_t quiet = mantissa != 0 ? 0x400000 : 0;
    return std::bit_cast<float>(sign | 0x7F800000 | quiet | (mantissa << 13));
  }
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

uint16_t narrow_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) {
    return static_cast<uint16_t>(sign | 0x7E00 | ((magnitude >> 13) & 0x3FF));
  }
  if (magnitude >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);
  if (magnitude < 0x38800000) {
    // Denormal result: adding 0.5 makes float arithmetic round at the last bit of float16.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000));
  }
  const uint32_t rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1) - (112u << 23);
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

}  // namespace
}  // namespace ortrain::cpu
#endif  // ORTRAIN_CPU_SIMD_STORAGE_SCALAR

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
  for (; i < n; ++i) out[i] = storage == Storage::kBF16 ? widen_bf16(in[i]) : widen_f16(in[i]);
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
      const auto rounded =
          hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFu)), odd));
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
  for (; i < n; ++i) out[i] = storage == Storage::kBF16 ? narrow_bf16(in[i]) : narrow_f16(in[i]);
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
