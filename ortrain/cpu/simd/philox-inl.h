// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Runs of Philox words; bit for bit those of ortrain/base/philox.h.

#if defined(ORTRAIN_CPU_SIMD_PHILOX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ORTRAIN_CPU_SIMD_PHILOX_INL_H_
#undef ORTRAIN_CPU_SIMD_PHILOX_INL_H_
#else
#define ORTRAIN_CPU_SIMD_PHILOX_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "ortrain/base/philox.h"

HWY_BEFORE_NAMESPACE();
namespace ortrain::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Writes the 4 * blocks words of blocks [first, first + blocks) to `out` in element order.
template <int kRounds = kPhiloxRounds>
HWY_INLINE void PhiloxWords(uint64_t seed, uint64_t stream, uint64_t first, int64_t blocks,
                            uint32_t* out) {
  int64_t b = 0;
#if HWY_TARGET != HWY_SCALAR
  // One counter per 64-bit lane. Only the low half of a lane counts: MulEven reads no other, so
  // what the upper halves collect on the way is never masked off.
  const hn::ScalableTag<uint64_t> d64;
  const hn::Repartition<uint32_t, decltype(d64)> d32;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d64));
  const auto multiplier0 = hn::Set(d32, 0xD2511F53u);
  const auto multiplier1 = hn::Set(d32, 0xCD9E8D57u);
  const auto low_half = hn::Set(d64, 0xFFFFFFFFull);
  // The keys of all rounds, made once per run.
  hn::Vec<decltype(d64)> keys0[kRounds], keys1[kRounds];
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    keys0[round] = hn::Set(d64, uint64_t{key0});
    keys1[round] = hn::Set(d64, uint64_t{key1});
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  // Two counters at a time: one chain of multiplications alone leaves the multiplier idle.
  for (; b + 2 * lanes <= blocks; b += 2 * lanes) {
    hn::Vec<decltype(d64)> c0[2], c1[2], c2[2], c3[2];
#pragma GCC unroll 2
    for (int u = 0; u < 2; ++u) {
      c0[u] = hn::Iota(d64, first + static_cast<uint64_t>(b + u * lanes));
      c1[u] = hn::ShiftRight<32>(c0[u]);
      c2[u] = hn::Set(d64, stream & 0xFFFFFFFFu);
      c3[u] = hn::Set(d64, stream >> 32);
    }
    for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 2
      for (int u = 0; u < 2; ++u) {
        const auto product0 = hn::MulEven(hn::BitCast(d32, c0[u]), multiplier0);
        const auto product1 = hn::MulEven(hn::BitCast(d32, c2[u]), multiplier1);
        c0[u] = hn::Xor(hn::ShiftRight<32>(product1), hn::Xor(c1[u], keys0[round]));
        c1[u] = product1;
        c2[u] = hn::Xor(hn::ShiftRight<32>(product0), hn::Xor(c3[u], keys1[round]));
        c3[u] = product0;
      }
    }
#pragma GCC unroll 2
    for (int u = 0; u < 2; ++u) {
      const auto words01 = hn::Or(hn::And(c0[u], low_half), hn::ShiftLeft<32>(c1[u]));
      const auto words23 = hn::Or(hn::And(c2[u], low_half), hn::ShiftLeft<32>(c3[u]));
      hn::StoreInterleaved2(words01, words23, d64,
                            reinterpret_cast<uint64_t*>(out + 4 * (b + u * lanes)));
    }
  }
#endif
  for (; b < blocks; ++b) {
    const auto words = philox_block<kRounds>(seed, stream, first + static_cast<uint64_t>(b));
    for (int i = 0; i < 4; ++i) out[4 * b + i] = words[i];
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ortrain::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
