// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/storage.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "ortrain/cpu/simd/for_each_target.h"

namespace ortrain::cpu {
namespace {

// Every 16-bit pattern in order: widening must give the value that the format defines.
double value_of(Storage storage, uint16_t bits) {
  const int exponent_bits = storage == Storage::kBF16 ? 8 : 5;
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

class StorageFormats : public ::testing::TestWithParam<Storage> {};
INSTANTIATE_TEST_SUITE_P(Formats, StorageFormats,
                         ::testing::Values(Storage::kBF16, Storage::kF16));

TEST_P(StorageFormats, EveryPatternWidensAndReturns) {
  std::vector<uint16_t> bits(65536 + 3);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  for_each_target([&] {
    const int64_t n = static_cast<int64_t>(bits.size());
    std::vector<float> wide(n);
    std::vector<uint16_t> back(n);
    widen(GetParam(), bits.data(), wide.data(), n);
    narrow(GetParam(), wide.data(), back.data(), n);
    for (int64_t i = 0; i < n; ++i) {
      const double want = value_of(GetParam(), bits[i]);
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(wide[i])) << i;
        ASSERT_TRUE(std::isnan(value_of(GetParam(), back[i]))) << i;
      } else {
        ASSERT_EQ(wide[i], want) << i;
        ASSERT_EQ(std::signbit(wide[i]), std::signbit(want));
        ASSERT_EQ(back[i], bits[i]);
      }
    }
  });
}

TEST_P(StorageFormats, NarrowingRoundsToNearestEven) {
  for_each_target([&] {
    std::vector<float> in;
    for (uint16_t low = 1; low < 0x7B00; low += 7) {
      const double a = value_of(GetParam(), low);
      const double b = value_of(GetParam(), low + 1);
      if (std::isinf(b)) break;
      const float middle = static_cast<float>((a + b) / 2);
      in.insert(in.end(), {std::nextafter(middle, 0.0f), middle,
                           std::nextafter(middle, std::numeric_limits<float>::infinity())});
    }
    std::vector<uint16_t> out(in.size());
    narrow(GetParam(), in.data(), out.data(), static_cast<int64_t>(in.size()));
    for (size_t i = 0; i < in.size(); i += 3) {
      const uint16_t low = static_cast<uint16_t>(1 + 7 * (i / 3));
      ASSERT_EQ(out[i], low);
      ASSERT_EQ(out[i + 1], low % 2 == 0 ? low : low + 1);
      ASSERT_EQ(out[i + 2], low + 1);
    }
  });
}

TEST_P(StorageFormats, OverflowIsInfinity) {
  for_each_target([&] {
    std::vector<float> in(17, std::numeric_limits<float>::max());
    std::vector<uint16_t> out(17);
    narrow(GetParam(), in.data(), out.data(), 17);
    for (uint16_t v : out) EXPECT_EQ(value_of(GetParam(), v), HUGE_VAL);
  });
}

}  // namespace
}  // namespace ortrain::cpu
