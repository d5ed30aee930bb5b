// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/simd/reduce_runs.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "ortrain/cpu/simd/for_each_target.h"

namespace ortrain::cpu {
namespace {

constexpr ReduceKind kKinds[] = {ReduceKind::sum, ReduceKind::sum_abs, ReduceKind::sum_squares,
                                 ReduceKind::maximum, ReduceKind::minimum};

double identity(ReduceKind kind) {
  if (kind == ReduceKind::maximum) return -INFINITY;
  return kind == ReduceKind::minimum ? INFINITY : 0;
}

double step(ReduceKind kind, double state, double x) {
  switch (kind) {
    case ReduceKind::sum: return state + x;
    case ReduceKind::sum_abs: return state + std::abs(x);
    case ReduceKind::sum_squares: return state + x * x;
    case ReduceKind::maximum: return std::isnan(state) || std::isnan(x) ? NAN : std::max(state, x);
    default: return std::isnan(state) || std::isnan(x) ? NAN : std::min(state, x);
  }
}

template <typename T>
class ReduceRuns : public ::testing::Test {
 protected:
  static std::vector<T> numbers(size_t n) {
    std::vector<T> x(n);
    for (size_t i = 0; i < n; ++i) x[i] = static_cast<T>(std::sin(1.7 * static_cast<double>(i)));
    return x;
  }
  static constexpr double kTolerance = sizeof(T) == 4 ? 2e-5 : 1e-12;
};
using Floats = ::testing::Types<float, double>;
TYPED_TEST_SUITE(ReduceRuns, Floats);

TYPED_TEST(ReduceRuns, EveryLength) {
  for_each_target([&] {
    for (ReduceKind kind : kKinds) {
      for (size_t n : {0, 1, 7, 8, 9, 17, 31, 64, 65, 1000}) {
        const std::vector<TypeParam> x = this->numbers(n);
        double expected = identity(kind);
        for (TypeParam value : x) expected = step(kind, expected, static_cast<double>(value));
        const double actual = reduce_run(kind, x.data(), static_cast<int64_t>(n));
        if (std::isinf(expected)) {
          EXPECT_EQ(actual, expected);
        } else {
          EXPECT_NEAR(actual, expected, this->kTolerance * std::max(1.0, std::abs(expected)))
              << static_cast<int>(kind) << " " << n;
        }
      }
    }
  });
}

TYPED_TEST(ReduceRuns, NanWinsWhereverItStands) {
  for_each_target([&] {
    for (ReduceKind kind : kKinds) {
      for (size_t n : {1, 9, 70}) {
        for (size_t at = 0; at < n; ++at) {
          std::vector<TypeParam> x = this->numbers(n);
          x[at] = static_cast<TypeParam>(NAN);
          EXPECT_TRUE(std::isnan(reduce_run(kind, x.data(), static_cast<int64_t>(n))));
          std::vector<TypeParam> into(n, static_cast<TypeParam>(identity(kind)));
          reduce_rows(kind, x.data(), 0, 5, static_cast<int64_t>(n), into.data());
          for (size_t c = 0; c < n; ++c) EXPECT_EQ(std::isnan(into[c]), c == at);
        }
      }
    }
  });
}

TYPED_TEST(ReduceRuns, RowsOfEveryWidth) {
  for_each_target([&] {
    for (ReduceKind kind : kKinds) {
      for (int64_t rows : {0, 1, 3, 4, 9}) {
        for (int64_t columns : {1, 7, 8, 9, 17, 33}) {
          const int64_t stride = columns + 3;
          const std::vector<TypeParam> x = this->numbers(static_cast<size_t>(10 * stride));
          std::vector<TypeParam> into(static_cast<size_t>(columns), TypeParam{0.25});
          reduce_rows(kind, x.data(), stride, rows, columns, into.data());
          for (int64_t c = 0; c < columns; ++c) {
            double expected = 0.25;
            for (int64_t r = 0; r < rows; ++r) {
              expected = step(kind, expected, static_cast<double>(x[r * stride + c]));
            }
            EXPECT_NEAR(into[static_cast<size_t>(c)], expected, this->kTolerance * 10);
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace ortrain::cpu
