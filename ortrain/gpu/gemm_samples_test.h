// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/base/error.h"
#include "ortrain/gpu/gemm.h"

// Products with what they should give, for tests of all ways to make them.
namespace ortrain::gpu {

// Doubles that every type here holds exactly.
inline std::vector<double> numbers(int64_t count, int64_t step) {
  std::vector<double> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(static_cast<double>(i * step % 11 - 5) / 4);
  }
  return values;
}

inline double activated(Activation activation, double x) {
  const double inner = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
  switch (activation) {
    case Activation::relu:
      return std::max(x, 0.0);
    case Activation::gelu:
      return x * 0.5 * std::erfc(-x / std::sqrt(2));
    case Activation::gelu_tanh:
      return 0.5 * x * (1 + std::tanh(inner));
    default:
      return x;
  }
}
inline double slope(Activation activation, double x) {
  if (activation == Activation::relu) return x > 0 ? 1 : 0;
  const double h = 1e-5;
  return (activated(activation, x + h) - activated(activation, x - h)) / (2 * h);
}

struct Result {
  std::vector<double> d, aux, bias_gradient;
};

inline int64_t or_dense(int64_t ld, int64_t dense) { return ld == 0 ? dense : ld; }

// Sizes of the operands in elements.
struct Sizes {
  int64_t a, b, c, d;
  explicit Sizes(const GemmProblem& p)
      : a((p.trans_a ? p.k : p.m) * or_dense(p.lda, p.trans_a ? p.m : p.k)),
        b((p.trans_b ? p.n : p.k) * or_dense(p.ldb, p.trans_b ? p.k : p.n)),
        c(p.m * or_dense(p.ldd, p.n)),
        d(p.m * or_dense(p.ldd, p.n)) {
    if (p.c_column >= 0 && p.m > 0 && p.n > 0) {
      c = std::max(c, (p.m - 1) * p.c_row + (p.n - 1) * p.c_column + 1);
    }
    for (const BatchAxis& axis : p.batch) {
      a += (axis.count - 1) * axis.a;
      b += (axis.count - 1) * axis.b;
      c += (axis.count - 1) * std::max(axis.c, axis.d);
      d += (axis.count - 1) * axis.d;
    }
  }
};

inline Result expected(const GemmProblem& p, const std::vector<double>& a,
                       const std::vector<double>& b, const std::vector<double>& c,
                       const std::vector<double>& bias, const std::vector<double>& aux) {
  const int64_t lda = or_dense(p.lda, p.trans_a ? p.m : p.k);
  const int64_t ldb = or_dense(p.ldb, p.trans_b ? p.k : p.n), ldd = or_dense(p.ldd, p.n);
  const Sizes sizes(p);
  Result result{std::vector<double>(sizes.d, -1.0), std::vector<double>(sizes.d, -1.0),
                std::vector<double>(p.n, 0.0)};
  int64_t count = 1;
  for (const BatchAxis& axis : p.batch) count *= axis.count;
  for (int64_t member = 0; member < count; ++member) {
    BatchAxis at;
    int64_t rest = member;
    for (size_t i = p.batch.size(); i-- > 0;) {
      const BatchAxis& axis = p.batch[i];
      const int64_t position = rest % axis.count;
      rest /= axis.count;
      at.a += position * axis.a;
      at.b += position * axis.b;
      at.c += position * (p.c_column < 0 ? axis.d : axis.c);
      at.d += position * axis.d;
    }
    for (int64_t i = 0; i < p.m; ++i) {
      for (int64_t j = 0; j < p.n; ++j) {
        double sum = 0;
        for (int64_t q = 0; q < p.k; ++q) {
          sum += a[at.a + (p.trans_a ? q * lda + i : i * lda + q)] *
                 b[at.b + (p.trans_b ? j * ldb + q : q * ldb + j)];
        }
        double z = p.alpha * sum;
        if (p.beta != 0.0) {
          z += p.beta * c[at.c + (p.c_column < 0 ? i * ldd + j : i * p.c_row + j * p.c_column)];
        }
        if (p.bias == BiasAlong::columns) z += bias[j];
        if (p.bias == BiasAlong::rows) z += bias[i];
        const int64_t place = at.d + i * ldd + j;
        result.aux[place] = z;
        result.d[place] = p.activation_gradient ? z * slope(p.activation, aux[place])
                                                : activated(p.activation, z);
        result.bias_gradient[j] += result.d[place];
      }
    }
  }
  return result;
}

template <class T>
std::vector<T> rounded(const std::vector<double>& values, size_t offset = 0) {
  std::vector<T> result(offset);
  for (const double value : values) {
    result.push_back(static_cast<T>(static_cast<ComputeType<T>>(value)));
  }
  return result;
}
template <class T>
void expect_near(const std::vector<T>& actual, const std::vector<double>& wanted, double tolerance,
                 const char* what) {
  ASSERT_EQ(actual.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(actual[i]), wanted[i],
                tolerance * std::max(1.0, std::abs(wanted[i])))
        << what << " " << i;
  }
}

// Runs the problem in all float types; `offset` elements lie in front of each operand. half: the
// algorithm of the 16-bit types, where it is another.
inline void check_gemm(GemmProblem p, std::string_view algorithm = "tiled", size_t offset = 0,
                       std::string_view half = "") {
  for (const DType type : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
    p.dtype = type;
    const double tolerance = type == DType::f64   ? 1e-9
                             : type == DType::f32 ? 1e-4
                             : type == DType::f16 ? 4e-3
                                                  : 3e-2;
    SCOPED_TRACE(name_of(type));
    const Sizes sizes(p);
    const auto a = numbers(sizes.a, 3), b = numbers(sizes.b, 5), c = numbers(sizes.c, 7),
               bias = numbers(std::max(p.m, p.n), 2), aux = numbers(sizes.d, 4);
    const Result wanted = expected(p, a, b, c, bias, aux);
    const Gemm gemm(p);
    EXPECT_EQ(gemm.algorithm(), size_of(type) == 2 && !half.empty() ? half : algorithm);
    dispatch_float(type, [&]<class T>(TypeTag<T>) {
      const std::vector<T> left = rounded<T>(a, offset), right = rounded<T>(b, offset),
                           addend = rounded<T>(c, offset), shift = rounded<T>(bias);
      std::vector<T> d = rounded<T>(std::vector<double>(sizes.d, -1.0)), kept = rounded<T>(aux);
      std::vector<T> sums(static_cast<size_t>(p.n));
      std::vector<double> workspace(gemm.workspace_bytes().value() / sizeof(double) + 1, NAN);
      gemm.run({.a = left.data() + offset,
                .b = right.data() + offset,
                .d = d.data(),
                .c = addend.data() + offset,
                .bias = shift.data(),
                .aux = kept.data(),
                .bias_gradient = sums.data()},
               workspace.data(), nullptr);
      expect_near(d, wanted.d, tolerance, "D");
      if (p.keep_aux) expect_near(kept, wanted.aux, tolerance, "aux");
      if (p.bias_gradient) expect_near(sums, wanted.bias_gradient, 3 * tolerance, "bias gradient");
    });
  }
}

inline std::vector<GemmProblem> problems() {
  std::vector<GemmProblem> all;
  for (const bool trans_a : {false, true}) {
    for (const bool trans_b : {false, true}) {
      GemmProblem p{.m = 70, .n = 67, .k = 45, .trans_a = trans_a, .trans_b = trans_b};
      all.push_back(p);
      p = {.m = 65, .n = 72, .k = 40, .trans_a = trans_a, .trans_b = trans_b, .alpha = 0.5};
      p.lda = 88;
      p.ldb = 80;
      p.ldd = 96;
      p.bias = BiasAlong::columns;
      p.beta = -0.5;
      all.push_back(p);
      all.push_back({.m = 5,
                     .n = 9,
                     .k = 1030,
                     .trans_a = trans_a,
                     .trans_b = trans_b,
                     .alpha = 0.125,
                     .bias = BiasAlong::rows});
    }
  }
  // Addends that repeat.
  for (const auto& [row, column] : {std::pair{0, 1}, {1, 0}, {0, 0}, {40, 1}}) {
    all.push_back(
        {.m = 6, .n = 33, .k = 8, .alpha = 0.5, .beta = 2.0, .c_row = row, .c_column = column});
  }
  // Batches: dense, shared factors, five axes that do not join.
  all.push_back({.m = 3, .n = 4, .k = 5, .beta = 1.0, .batch = {{7, 15, 20, 0, 12}}});
  all.push_back({.m = 3, .n = 4, .k = 5, .batch = {{2, 0, 60, 0, 36}, {3, 15, 20, 0, 12}}});
  all.push_back({.m = 2,
                 .n = 3,
                 .k = 4,
                 .batch = {{2, 16, 0, 0, 96},
                           {2, 0, 24, 0, 48},
                           {2, 8, 0, 0, 24},
                           {2, 0, 12, 0, 12},
                           {2, 0, 0, 0, 6}}});
  // No inner extent.
  all.push_back({.m = 3, .n = 4, .k = 0, .bias = BiasAlong::columns});
  return all;
}

}  // namespace ortrain::gpu
