// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/philox.h"

#include <gtest/gtest.h>

namespace ortrain {
namespace {

using Words = std::array<uint32_t, 4>;

// Known answers published with the Random123 library.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, ElementMapsToCounterSeedAndStream) {
  const uint64_t seed = 0x299f31d0a4093822;
  const uint64_t stream = 0x0370734413198a2e;
  const uint64_t block = 0x05a308d3243f6a88;
  const Words words =
      philox({0x243f6a88, 0x05a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0});
  EXPECT_EQ(philox_block(seed, stream, block), words);
  for (uint64_t i = 0; i < 4; ++i) EXPECT_EQ(philox_word(seed, stream, 4 * block + i), words[i]);
}

// Known answers of seven rounds: Random123's kat_vectors.
TEST(Philox, SevenRounds) {
  EXPECT_EQ(philox<7>({0, 0, 0, 0}, {0, 0}),
            (Words{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}));
  constexpr uint32_t kOnes = 0xFFFFFFFF;
  EXPECT_EQ(philox<7>({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Words{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}));
  EXPECT_EQ(philox<7>({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}));
}

TEST(Philox, HalvesAreTheWordsLowFirst) {
  const Words words = philox<7>({9, 0, 3, 0}, {7, 0});
  for (uint64_t i = 0; i < 8; ++i) {
    EXPECT_EQ(philox_half(7, 3, 72 + i), i % 2 == 0 ? words[i / 2] & 0xFFFF : words[i / 2] >> 16);
  }
}

TEST(Philox, HalfThreshold) {
  EXPECT_EQ(half_threshold(0.0), 0u);
  EXPECT_EQ(half_threshold(-1.0), 0u);
  EXPECT_EQ(half_threshold(0.5), 0x8000u);
  EXPECT_EQ(half_threshold(1.0), 0x10000u);  // no half is as much
  EXPECT_EQ(half_threshold(1e-6), 0u);
  EXPECT_EQ(half_scale(0.5), 2.0);
  EXPECT_EQ(half_scale(1.0), 0.0);
  EXPECT_EQ(half_scale(0.0), 1.0);
  EXPECT_EQ(half_scale(0.9999), 65536.0 / 7.0);  // one of 9362 is kept, not of 10000
  const uint32_t threshold = half_threshold(0.1);
  int dropped = 0;
  for (uint64_t i = 0; i < 100000; ++i) dropped += philox_half(7, 3, i) < threshold;
  EXPECT_NEAR(dropped, 10000, 400);
}

TEST(Philox, DropoutThreshold) {
  EXPECT_EQ(dropout_threshold(0.0), 0u);
  EXPECT_EQ(dropout_threshold(-1.0), 0u);
  EXPECT_EQ(dropout_threshold(0.5), 0x80000000u);
  EXPECT_EQ(dropout_threshold(1.0), 0xFFFFFFFFu);
  EXPECT_EQ(dropout_scale(0.5), 2.0);
  EXPECT_EQ(dropout_scale(1.0), 0.0);
}

TEST(Philox, KeepsTheAskedShare) {
  const uint32_t threshold = dropout_threshold(0.1);
  int dropped = 0;
  for (uint64_t i = 0; i < 100000; ++i) dropped += philox_word(7, 3, i) < threshold;
  EXPECT_NEAR(dropped, 10000, 400);
}

}  // namespace
}  // namespace ortrain
