// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/simd/vector_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "ortrain/cpu/simd/for_each_target.h"

namespace ortrain::cpu {
namespace {

// Error of `got` in units of the last place of the exact value rounded to T.
template <class T>
double ulp_error(T got, long double exact) {
  const T rounded = static_cast<T>(exact);
  if (std::isnan(rounded)) return std::isnan(got) ? 0 : 1e9;
  if (std::isinf(rounded)) {
    // One step below infinity is still a one-ulp answer.
    return got == rounded || std::nextafter(got, rounded) == rounded ? 0 : 1e9;
  }
  if (std::isinf(got)) return std::nextafter(rounded, got) == got ? 1 : 1e9;
  const T magnitude = std::abs(rounded);
  const long double step =
      std::nextafter(magnitude, std::numeric_limits<T>::infinity()) - magnitude;
  return static_cast<double>(std::abs(static_cast<long double>(got) - exact) / step);
}

template <class T, class F, class G>
void expect_accurate(F function, G exact, std::vector<T> x, double limit) {
  for (T special : {T(0), -T(0), T(1), T(-1), std::numeric_limits<T>::infinity(),
                    -std::numeric_limits<T>::infinity(), std::numeric_limits<T>::quiet_NaN(),
                    std::numeric_limits<T>::max(), std::numeric_limits<T>::lowest(),
                    std::numeric_limits<T>::min(), std::numeric_limits<T>::denorm_min(),
                    -std::numeric_limits<T>::denorm_min(), std::numeric_limits<T>::epsilon()}) {
    x.push_back(special);
  }
  for_each_target([&] {
    std::vector<T> y(x.size());
    function(x.data(), y.data(), static_cast<int64_t>(x.size()));
    double worst = 0;
    T at = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double error = ulp_error(y[i], exact(static_cast<long double>(x[i])));
      if (!(error <= worst)) worst = error, at = x[i];
    }
    EXPECT_LE(worst, limit) << "at " << at;
    ::testing::Test::RecordProperty("worst_ulp", std::to_string(worst));
  });
}

template <class T>
std::vector<T> spread(T low, T high, int count) {
  std::mt19937 engine(7);
  std::uniform_real_distribution<T> distribution(low, high);
  std::vector<T> x(count);
  for (T& v : x) v = distribution(engine);
  // Small magnitudes of both signs, log-uniform.
  std::uniform_real_distribution<T> exponent(-30, 3);
  for (int i = 0; i < count / 2; ++i) {
    const T v = std::exp2(exponent(engine));
    if (v <= high) x.push_back(v);
    if (-v >= low) x.push_back(-v);
  }
  return x;
}

template <class T>
class VectorMath : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(VectorMath, Types);

constexpr int kCount = 20000;

TYPED_TEST(VectorMath, Exp) {
  using T = TypeParam;
  const T range = sizeof(T) == 4 ? 105 : 750;
  expect_accurate<T>([](auto... a) { vector_exp(a...); }, [](long double v) { return std::exp(v); },
                     spread<T>(-range, range, kCount), 1.5);
}

TYPED_TEST(VectorMath, Expm1) {
  using T = TypeParam;
  expect_accurate<T>([](auto... a) { vector_expm1(a...); },
                     [](long double v) { return std::expm1(v); }, spread<T>(-40, 80, kCount), 3);
}

TYPED_TEST(VectorMath, Log) {
  using T = TypeParam;
  auto x = spread<T>(0, 4, kCount);
  for (int i = -140; i < 127; ++i) x.push_back(std::ldexp(T(1.37), i));
  expect_accurate<T>([](auto... a) { vector_log(a...); }, [](long double v) { return std::log(v); },
                     x, 1.5);
}

TYPED_TEST(VectorMath, Log1p) {
  using T = TypeParam;
  expect_accurate<T>([](auto... a) { vector_log1p(a...); },
                     [](long double v) { return std::log1p(v); }, spread<T>(-1, 50, kCount), 3.5);
}

TYPED_TEST(VectorMath, Tanh) {
  using T = TypeParam;
  expect_accurate<T>([](auto... a) { vector_tanh(a...); },
                     [](long double v) { return std::tanh(v); }, spread<T>(-25, 25, kCount), 4);
}

TYPED_TEST(VectorMath, Sigmoid) {
  using T = TypeParam;
  // Below -80 (f32) the exact value is denormal and exp and the quotient round separately.
  expect_accurate<T>([](auto... a) { vector_sigmoid(a...); },
                     [](long double v) {
                       if (std::isinf(v)) return v > 0 ? 1.0L : 0.0L;
                       return v < 0 ? std::exp(v) / (1 + std::exp(v)) : 1 / (1 + std::exp(-v));
                     },
                     spread<T>(-100, 100, kCount), 3);
}

TYPED_TEST(VectorMath, Erf) {
  using T = TypeParam;
  expect_accurate<T>([](auto... a) { vector_erf(a...); }, [](long double v) { return std::erf(v); },
                     spread<T>(-7, 7, kCount), 4);
}

TYPED_TEST(VectorMath, EveryLengthAndInPlace) {
  using T = TypeParam;
  for_each_target([&] {
    for (int64_t n : {0, 1, 3, 7, 8, 9, 15, 16, 17, 33}) {
      std::vector<T> x(n + 1, T(0.5));
      x[n] = 42;
      vector_exp(x.data(), x.data(), n);
      for (int64_t i = 0; i < n; ++i) EXPECT_NEAR(x[i], std::exp(T(0.5)), 1e-6);
      EXPECT_EQ(x[n], 42);
    }
  });
}

}  // namespace
}  // namespace ortrain::cpu
