// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

#include "ortrain/base/device_code.h"

namespace ortrain {

inline constexpr int kPhiloxRounds = 10;

// Philox 4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): four
// random words from a 128-bit counter and a 64-bit key, with no state.
template <int kRounds = kPhiloxRounds>
ORTRAIN_HOST_DEVICE inline std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter,
                                                          std::array<uint32_t, 2> key) {
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// The words of elements 4 * block .. 4 * block + 3 of the node with this `stream`.
template <int kRounds = kPhiloxRounds>
ORTRAIN_HOST_DEVICE inline std::array<uint32_t, 4> philox_block(uint64_t seed, uint64_t stream,
                                                                uint64_t block) {
  return philox<kRounds>({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                          static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)},
                         {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
}

// The word of element `index`.
ORTRAIN_HOST_DEVICE inline uint32_t philox_word(uint64_t seed, uint64_t stream, uint64_t index) {
  return philox_block(seed, stream, index / 4)[index % 4];
}

// Dropout keeps an element when its word is at least this: P(dropped) = ratio.
ORTRAIN_HOST_DEVICE inline uint32_t dropout_threshold(double ratio) {
  const double scaled = ratio * 4294967296.0;
  if (!(scaled > 0.0)) return 0;
  return scaled >= 4294967295.0 ? 0xFFFFFFFFu : static_cast<uint32_t>(scaled);
}

// Attention drops of many more elements than layers have, and draws three times in a step: 16 bits
// for each, in seven rounds, the fewest that pass BigCrush (Salmon et al., table 2).
inline constexpr int kPhiloxRoundsOfHalves = 7;
inline constexpr int kHalvesOfBlock = 8;

// Rows of `columns` elements begin with a block each.
ORTRAIN_HOST_DEVICE inline int64_t blocks_of_row(int64_t columns) {
  return (columns + kHalvesOfBlock - 1) / kHalvesOfBlock;
}

// The words that hold the halves of elements 8 * block .. 8 * block + 7.
ORTRAIN_HOST_DEVICE inline std::array<uint32_t, 4> philox_halves(uint64_t seed, uint64_t stream,
                                                                 uint64_t block) {
  return philox_block<kPhiloxRoundsOfHalves>(seed, stream, block);
}

// The half of element `index`: the low one of a word comes first.
ORTRAIN_HOST_DEVICE inline uint32_t philox_half(uint64_t seed, uint64_t stream, uint64_t index) {
  const auto words = philox_halves(seed, stream, index / kHalvesOfBlock);
  return words[index % kHalvesOfBlock / 2] >> (index % 2 * 16) & 0xFFFFu;
}

// An element is kept when its half is at least this, of 0 to 2^16: P(dropped) is the ratio rounded
// to a multiple of 2^-16.
ORTRAIN_HOST_DEVICE inline uint32_t half_threshold(double ratio) {
  const double scaled = ratio * 65536.0 + 0.5;
  if (!(scaled > 0.0)) return 0;
  return scaled >= 65536.0 ? 65536u : static_cast<uint32_t>(scaled);
}

// Factor of what is kept by that threshold: the inverse of the probability as it is.
ORTRAIN_HOST_DEVICE inline double half_scale(double ratio) {
  const uint32_t threshold = half_threshold(ratio);
  return threshold < 65536u ? 65536.0 / (65536u - threshold) : 0.0;
}

// Factor of the kept elements; 0 at ratio 1, where nothing is kept.
ORTRAIN_HOST_DEVICE inline double dropout_scale(double ratio) {
  return ratio < 1.0 ? 1.0 / (1.0 - ratio) : 0.0;
}

}  // namespace ortrain
