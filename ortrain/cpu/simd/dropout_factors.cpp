// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/simd/dropout_factors.h"

#include <bit>
#include <cstring>

#include "ortrain/cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ortrain/cpu/simd/dropout_factors.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "ortrain/cpu/simd/philox-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ortrain::cpu {
namespace HWY_NAMESPACE {
namespace {

void DropoutFactors(uint64_t seed, uint64_t stream, uint32_t threshold, float scale, int64_t begin,
                    int64_t end, float* HWY_RESTRICT factor) {
  constexpr int64_t kBlocks = 64;
  HWY_ALIGN uint32_t words[4 * kBlocks];
  const hn::ScalableTag<float> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const hn::Rebind<uint16_t, decltype(df)> d16;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  const auto limit = hn::Set(du, threshold);
  const auto value = hn::Set(df, scale);
  // Little-endian words hold their halves in the order of elements.
  static_assert(std::endian::native == std::endian::little);
  int64_t i = begin;
  while (i < end) {
    const int64_t first = i / kHalvesOfBlock;
    const int64_t last = HWY_MIN(first + kBlocks, (end + kHalvesOfBlock - 1) / kHalvesOfBlock);
    PhiloxWords<kPhiloxRoundsOfHalves>(seed, stream, static_cast<uint64_t>(first), last - first,
                                       words);
    const int64_t stop = HWY_MIN(end, kHalvesOfBlock * last);
    for (; i + lanes <= stop; i += lanes) {
      // By memcpy, since words are no halves to the compiler.
      HWY_ALIGN uint16_t halves[hn::MaxLanes(d16)];
      std::memcpy(halves, reinterpret_cast<const char*>(words) + 2 * (i - kHalvesOfBlock * first),
                  sizeof(uint16_t) * static_cast<size_t>(lanes));
      const auto drop = hn::Gt(limit, hn::PromoteTo(du, hn::Load(d16, halves)));
      hn::StoreU(hn::IfThenZeroElse(hn::RebindMask(df, drop), value), df, factor + (i - begin));
    }
    for (; i < stop; ++i) {
      const int64_t k = i - kHalvesOfBlock * first;
      const uint32_t last_half = words[k / 2] >> (k % 2 * 16) & 0xFFFFu;
      factor[i - begin] = last_half >= threshold ? scale : 0.0f;
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace ortrain::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ortrain::cpu {

HWY_EXPORT(DropoutFactors);
void dropout_factors(uint64_t seed, uint64_t stream, uint32_t threshold, float scale, int64_t begin,
                     int64_t end, float* factor) {
  HWY_DYNAMIC_DISPATCH(DropoutFactors)(seed, stream, threshold, scale, begin, end, factor);
}

}  // namespace ortrain::cpu
#endif  // HWY_ONCE
