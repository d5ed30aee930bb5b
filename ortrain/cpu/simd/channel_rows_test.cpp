// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/simd/channel_rows.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "ortrain/cpu/simd/for_each_target.h"

namespace ortrain::cpu {
namespace {

template <class T>
class ChannelRowsTest : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(ChannelRowsTest, Types);

TYPED_TEST(ChannelRowsTest, FollowTheirFormulas) {
  using T = TypeParam;
  for_each_target([] {
    const ChannelRows<T> rows = channel_rows<T>();
    const double tolerance = sizeof(T) == 4 ? 1e-5 : 1e-13;
    for (int64_t n : {0, 1, 2, 7, 8, 15, 16, 31, 33, 64, 101}) {
      SCOPED_TRACE(n);
      std::mt19937 engine(static_cast<uint32_t>(n));
      std::normal_distribution<T> distribution(T(3), T(2));
      std::vector<T> x(n), dy(n);
      for (T& v : x) v = distribution(engine);
      for (T& v : dy) v = distribution(engine);
      const double mean = 2.75;
      double sum = 0, squares = 0, plain = 5, centred = -1;
      for (int64_t i = 0; i < n; ++i) {
        sum += x[i];
        squares += (x[i] - mean) * (x[i] - mean);
        plain += dy[i];
        centred += dy[i] * (x[i] - mean);
      }
      // Sums are double, whatever T is.
      EXPECT_NEAR(rows.sum(x.data(), n), sum, 1e-12 * (1 + n));
      EXPECT_NEAR(rows.squared_distance(x.data(), mean, n), squares, 1e-12 * (1 + 10 * n));
      double got_plain = 5, got_centred = -1;
      rows.gradient_sums(dy.data(), x.data(), mean, n, &got_plain, &got_centred);
      EXPECT_NEAR(got_plain, plain, 1e-12 * (1 + n));
      EXPECT_NEAR(got_centred, centred, 1e-12 * (1 + 10 * n));

      std::vector<T> y(n + 1, T(77)), dx(dy);
      rows.affine(x.data(), T(mean), T(0.5), T(-2), y.data(), n);
      rows.input_gradient(dx.data(), x.data(), T(mean), T(0.5), T(0.25), T(-2), dx.data(), n);
      for (int64_t i = 0; i < n; ++i) {
        ASSERT_NEAR(y[i], (x[i] - mean) * 0.5 - 2, tolerance * 10) << i;
        ASSERT_NEAR(dx[i], dy[i] * 0.5 + (x[i] - mean) * 0.25 - 2, tolerance * 10) << i;
      }
      EXPECT_EQ(y[n], T(77));
    }
  });
}

}  // namespace
}  // namespace ortrain::cpu
