// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Loops of vector functions over contiguous elements; the last, incomplete vector goes through a
// buffer so that nothing behind the end is touched.

#if defined(ORTRAIN_CPU_SIMD_TILE_LOOPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ORTRAIN_CPU_SIMD_TILE_LOOPS_INL_H_
#undef ORTRAIN_CPU_SIMD_TILE_LOOPS_INL_H_
#else
#define ORTRAIN_CPU_SIMD_TILE_LOOPS_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ortrain::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class T, class F>
HWY_INLINE void MapTile(const void* a, void* y, int64_t n, F f) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const T* in = static_cast<const T*>(a);
  T* out = static_cast<T*>(y);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(f(d, hn::LoadU(d, in + i)), d, out + i);
  if (i < n) {
    HWY_ALIGN T buffer[HWY_MAX_BYTES / sizeof(T)] = {};
    const size_t bytes = static_cast<size_t>(n - i) * sizeof(T);
    std::memcpy(buffer, in + i, bytes);
    hn::Store(f(d, hn::Load(d, buffer)), d, buffer);
    std::memcpy(out + i, buffer, bytes);
  }
}

// Bit k of kSingle: operand k is one value.
template <class T, unsigned kSingle, class F>
HWY_INLINE void ZipTile(const void* a, const void* b, void* y, int64_t n, F f) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const T* left = static_cast<const T*>(a);
  const T* right = static_cast<const T*>(b);
  T* out = static_cast<T*>(y);
  const auto single_left = hn::Set(d, (kSingle & 1) ? left[0] : T{0});
  const auto single_right = hn::Set(d, (kSingle & 2) ? right[0] : T{0});
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto u = (kSingle & 1) ? single_left : hn::LoadU(d, left + i);
    const auto v = (kSingle & 2) ? single_right : hn::LoadU(d, right + i);
    hn::StoreU(f(d, u, v), d, out + i);
  }
  if (i < n) {
    HWY_ALIGN T left_buffer[HWY_MAX_BYTES / sizeof(T)] = {};
    HWY_ALIGN T right_buffer[HWY_MAX_BYTES / sizeof(T)] = {};
    const size_t bytes = static_cast<size_t>(n - i) * sizeof(T);
    if (!(kSingle & 1)) std::memcpy(left_buffer, left + i, bytes);
    if (!(kSingle & 2)) std::memcpy(right_buffer, right + i, bytes);
    const auto u = (kSingle & 1) ? single_left : hn::Load(d, left_buffer);
    const auto v = (kSingle & 2) ? single_right : hn::Load(d, right_buffer);
    hn::Store(f(d, u, v), d, left_buffer);
    std::memcpy(out + i, left_buffer, bytes);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ortrain::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
