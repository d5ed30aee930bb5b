// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/byte_count.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

using Exact = __int128;
constexpr Exact kFar = Exact{1} << 63;  // and beyond

// Small ones, zeros, and powers of two up to the end of int64, give or take one.
int64_t random_extent(std::mt19937_64& draw) {
  switch (draw() % 4) {
    case 0:
      return static_cast<int64_t>(draw() % 3);
    case 1:
      return static_cast<int64_t>(draw() % 5000);
    default:
      return (int64_t{1} << draw() % 63) + static_cast<int64_t>(draw() % 3) - 1;
  }
}

TEST(ByteCount, IsExactOrRefused) {
  std::mt19937_64 draw(1);
  int given = 0, refused = 0;
  for (int round = 0; round < 200000; ++round) {
    const int64_t a = random_extent(draw), b = random_extent(draw), c = random_extent(draw);
    Exact product = sizeof(double), padded = 1;
    for (const int64_t extent : {a, b, c}) {
      product *= extent;
      padded *= extent == 0 ? 1 : extent;
      if (product > kFar) product = kFar;
      if (padded > kFar) padded = kFar;
    }
    try {
      const size_t bytes = bytes_of<double>(a, b, c).value();
      EXPECT_TRUE(product == static_cast<Exact>(bytes)) << a << " " << b << " " << c;
      ++given;
    } catch (const ShapeError&) {
      EXPECT_TRUE(product > kMostBytes || padded == kFar) << a << " " << b << " " << c;
      ++refused;
    }
  }
  EXPECT_GT(given, 20000);
  EXPECT_GT(refused, 20000);
}

TEST(ByteCount, SumsAndMultiplesDoNotWrap) {
  const ByteCount most = bytes_of<char>(kMostBytes);
  EXPECT_EQ((bytes_of<char>(kMostBytes - 64) + bytes_of<char>(64)).value(), most.value());
  EXPECT_THROW(most + bytes_of<char>(1), ShapeError);
  EXPECT_THROW(most * 2, ShapeError);
  EXPECT_THROW(bytes_of<char>(1) * SIZE_MAX, ShapeError);
  EXPECT_THROW(bytes_of<char>(kMostBytes - 1).rounded_up(4096 * 3), ShapeError);
  EXPECT_EQ((most * 0).value(), 0u);
  EXPECT_EQ(bytes_of<char>(65).rounded_up(64).value(), 128u);
  EXPECT_EQ(ByteCount().rounded_up(64).value(), 0u);
}

TEST(ByteCount, NegativeExtentsAreRefused) {
  EXPECT_THROW(bytes_of<float>(-1), ShapeError);
  EXPECT_THROW(bytes_of<float>(0, -5), ShapeError);
  EXPECT_THROW(count_elements(3, int64_t{INT64_MIN}), ShapeError);
  EXPECT_THROW(bytes_of<float>(SIZE_MAX), ShapeError);
}

TEST(CheckExtents, CountsThoseOfZeroAsOne) {
  check_extents(Dims{int64_t{1} << 40, 3, 0}, 8);
  check_extents(Dims{0, 0, 0}, 8);
  check_extents(Dims{}, 8);
  EXPECT_THROW(check_extents(Dims{int64_t{1} << 61, 0}, 8), ShapeError);
  EXPECT_THROW(check_extents(Dims{0, int64_t{1} << 45}, 8), ShapeError);
  EXPECT_THROW(check_extents(Dims{int64_t{1} << 32, int64_t{1} << 32, int64_t{1} << 32}, 1),
               ShapeError);
  EXPECT_THROW(check_extents(Dims{2, -1}, 4), ShapeError);
}

}  // namespace
}  // namespace ortrain
