// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/simd/dropout_factors.h"

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

void DropoutFactorsRun(uint64_t seed, uint64_t stream, uint32_t threshold, float scale,
                       int64_t begin, int64_t end, float* factor) {
  DropoutFactors(seed, stream, threshold, scale, begin, end, factor);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace ortrain::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ortrain::cpu {

HWY_EXPORT(DropoutFactorsRun);
void dropout_factors(uint64_t seed, uint64_t stream, uint32_t threshold, float scale,
                     int64_t begin, int64_t end, float* factor) {
  HWY_DYNAMIC_DISPATCH(DropoutFactorsRun)(seed, stream, threshold, scale, begin, end, factor);
}

}  // namespace ortrain::cpu
#endif  // HWY_ONCE
