// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/simd/row_ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "ortrain/cpu/simd/for_each_target.h"

namespace ortrain::cpu {
namespace {

template <class T>
class RowOpsTest : public ::testing::Test {
 protected:
  using Row = std::vector<T>;
  static constexpr T kTolerance = sizeof(T) == 4 ? T(2e-5) : T(1e-13);

  static Row random_row(int64_t n, uint32_t seed) {
    std::mt19937 engine(seed);
    std::normal_distribution<T> distribution(T(0.3), T(2));
    Row row(n);
    for (T& v : row) v = distribution(engine);
    return row;
  }

  static void expect_near(const Row& got, const std::vector<double>& want) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], want[i], kTolerance * (1 + std::abs(want[i]))) << i << " of " << got.size();
    }
  }

  // body(n, x, y) for each length on each target.
  template <class Body>
  static void for_each_length(Body body) {
    for_each_target([&] {
      for (int64_t n : {1, 2, 7, 8, 9, 15, 16, 17, 33, 100}) {
        SCOPED_TRACE(n);
        body(n, random_row(n, 1), random_row(n, 2));
      }
    });
  }
};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(RowOpsTest, Types);

std::vector<double> softmax(const auto& x) {
  double max = -HUGE_VAL;
  for (double v : x) max = std::max(max, v);
  std::vector<double> y;
  double sum = 0;
  for (double v : x) y.push_back(std::exp(v - max)), sum += y.back();
  for (double& v : y) v /= sum;
  return y;
}

TYPED_TEST(RowOpsTest, Reductions) {
  using T = TypeParam;
  this->for_each_length([](int64_t n, const auto& x, const auto& y) {
    const RowOps<T> ops = row_ops<T>();
    double sum = 0, dot = 0, max = -HUGE_VAL, exps = 0;
    for (int64_t i = 0; i < n; ++i) {
      sum += x[i], dot += double(x[i]) * y[i], max = std::max<double>(max, x[i]);
      exps += std::exp(double(x[i]) - 1);
    }
    const double tolerance = TestFixture::kTolerance * n;
    EXPECT_NEAR(ops.sum(x.data(), n), sum, tolerance);
    EXPECT_NEAR(ops.dot(x.data(), y.data(), n), dot, tolerance);
    EXPECT_EQ(ops.max(x.data(), n), static_cast<T>(max));
    EXPECT_NEAR(ops.sum_exp_shifted(1, x.data(), n), exps, TestFixture::kTolerance * exps);
    auto copy = x;
    EXPECT_NEAR(ops.exp_shifted(1, copy.data(), copy.data(), n), exps,
                TestFixture::kTolerance * exps);
  });
  EXPECT_EQ(row_ops<T>().max(nullptr, 0), -std::numeric_limits<T>::infinity());
  EXPECT_EQ(row_ops<T>().sum(nullptr, 0), 0);
}

TYPED_TEST(RowOpsTest, Elementwise) {
  using T = TypeParam;
  this->for_each_length([](int64_t n, const auto& x, auto y) {
    const RowOps<T> ops = row_ops<T>();
    std::vector<double> want(y.begin(), y.end());
    y.push_back(77);
    want.push_back(77);  // one beyond the end stays
    auto check = [&](auto f) {
      for (int64_t i = 0; i < n; ++i) want[i] = f(double(x[i]), want[i]);
      TestFixture::expect_near(y, want);
    };
    ops.add(x.data(), y.data(), n);
    check([](double a, double b) { return a + b; });
    ops.axpy(T(-0.5), x.data(), y.data(), n);
    check([](double a, double b) { return b - 0.5 * a; });
    ops.scale(T(3), y.data(), n);
    check([](double, double b) { return 3 * b; });
    ops.multiply(x.data(), y.data(), n);
    check([](double a, double b) { return a * b; });
    ops.exp_affine(T(2), T(4), T(0.25), x.data(), y.data(), n);
    check([](double a, double) { return 2 * std::exp(a - 4) + 0.25; });
  });
}

TYPED_TEST(RowOpsTest, Softmax) {
  using T = TypeParam;
  this->for_each_length([](int64_t n, auto x, const auto& dy) {
    const RowOps<T> ops = row_ops<T>();
    for (T shift : {T(0), T(1000), T(-1000)}) {
      auto shifted = x;
      for (T& v : shifted) v += shift;
      const auto want = softmax(shifted);
      auto y = shifted;
      ops.softmax(y.data(), y.data(), n);
      TestFixture::expect_near(y, want);
      auto log_y = shifted;
      ops.log_softmax(log_y.data(), log_y.data(), n);
      std::vector<double> log_want;
      for (double p : want) log_want.push_back(std::log(p));
      TestFixture::expect_near(log_y, log_want);

      double dot = 0, sum = 0;
      for (int64_t i = 0; i < n; ++i) dot += dy[i] * want[i], sum += dy[i];
      std::vector<double> dx_want, log_dx_want;
      for (int64_t i = 0; i < n; ++i) {
        dx_want.push_back(want[i] * (dy[i] - dot));
        log_dx_want.push_back(dy[i] - want[i] * sum);
      }
      auto dx = dy;
      ops.softmax_grad(dx.data(), y.data(), dx.data(), n);
      TestFixture::expect_near(dx, dx_want);
      dx = dy;
      ops.log_softmax_grad(dx.data(), log_y.data(), dx.data(), n);
      for (int64_t i = 0; i < n; ++i) {
        ASSERT_NEAR(dx[i], log_dx_want[i], TestFixture::kTolerance * (n + std::abs(sum)));
      }
    }
  });
}

TYPED_TEST(RowOpsTest, SpecialValuesReachTheResult) {
  using T = TypeParam;
  const T infinity = std::numeric_limits<T>::infinity();
  for_each_target([&] {
    const RowOps<T> ops = row_ops<T>();
    std::vector<T> x(9, T(1));
    x[8] = std::numeric_limits<T>::quiet_NaN();
    std::vector<T> y(9);
    ops.softmax(x.data(), y.data(), 9);
    for (T v : y) EXPECT_TRUE(std::isnan(v));
    x[8] = -infinity;
    ops.softmax(x.data(), y.data(), 9);
    EXPECT_EQ(y[8], 0);
    EXPECT_NEAR(y[0], 0.125, 1e-6);
    ops.log_softmax(x.data(), y.data(), 9);
    EXPECT_EQ(y[8], -infinity);
    std::fill(x.begin(), x.end(), -infinity);
    ops.softmax(x.data(), y.data(), 9);
    for (T v : y) EXPECT_TRUE(std::isnan(v));
  });
}

TYPED_TEST(RowOpsTest, Norms) {
  using T = TypeParam;
  this->for_each_length([this](int64_t n, const auto& x, const auto& dy) {
    const RowOps<T> ops = row_ops<T>();
    const auto scale = this->random_row(n, 3);
    const auto bias = this->random_row(n, 4);
    const double epsilon = 1e-3;
    for (const bool rms : {false, true}) {
      for (const bool affine : {false, true}) {
        double mean = 0, square = 0;
        for (int64_t i = 0; i < n && !rms; ++i) mean += double(x[i]) / n;
        for (int64_t i = 0; i < n; ++i) square += (x[i] - mean) * (x[i] - mean) / n;
        const double r = 1 / std::sqrt(square + epsilon);
        std::vector<double> want, dx_want, dscale_want, dbias_want;
        double mean_g = 0, mean_gh = 0;
        for (int64_t i = 0; i < n; ++i) {
          const double h = (x[i] - mean) * r;
          const double s = affine ? scale[i] : 1;
          want.push_back(h * s + (affine && !rms ? bias[i] : 0));
          dscale_want.push_back(1 + dy[i] * h);
          dbias_want.push_back(2 + double(dy[i]));
          if (!rms) mean_g += dy[i] * s / n;
          mean_gh += dy[i] * s * h / n;
        }
        for (int64_t i = 0; i < n; ++i) {
          const double s = affine ? scale[i] : 1;
          dx_want.push_back(r * (dy[i] * s - mean_g - (x[i] - mean) * r * mean_gh));
        }
        std::vector<T> y(n), dx(n), dscale(n, T(1)), dbias(n, T(2));
        T got_mean = 0, got_r = 0;
        const T* s = affine ? scale.data() : nullptr;
        if (rms) {
          ops.rms_norm(x.data(), s, T(epsilon), y.data(), &got_r, n);
          ops.rms_norm_grad(dy.data(), x.data(), s, got_r, dx.data(), dscale.data(), n);
        } else {
          ops.layer_norm(x.data(), s, affine ? bias.data() : nullptr, T(epsilon), y.data(),
                         &got_mean, &got_r, n);
          ops.layer_norm_grad(dy.data(), x.data(), s, got_mean, got_r, dx.data(), dscale.data(),
                              dbias.data(), n);
          TestFixture::expect_near(dbias, dbias_want);
        }
        EXPECT_NEAR(got_mean, mean, TestFixture::kTolerance);
        EXPECT_NEAR(got_r, r, TestFixture::kTolerance * (1 + r));
        TestFixture::expect_near(y, want);
        TestFixture::expect_near(dscale, dscale_want);
        // n = 1 has inv_std = 31.6 and a difference of equal terms.
        for (int64_t i = 0; i < n; ++i) {
          ASSERT_NEAR(dx[i], dx_want[i], TestFixture::kTolerance * (r * 20 + std::abs(dx_want[i])));
        }
      }
    }
  });
}

}  // namespace
}  // namespace ortrain::cpu
