// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/gemm.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "ortrain/cpu/gemm_packed.h"
#include "ortrain/cpu/onednn.h"
#include "ortrain/cpu/simd/for_each_target.h"

namespace ortrain::cpu {
namespace {

struct Case {
  int64_t m, n, k;
  bool trans_a, trans_b;
  double alpha = 1, beta = 0;
  bool bias = false;
  int64_t pad = 0;  // extra distance of rows
};

// Both backends of float through one name, so that each case runs on each.
struct Packed {
  template <class T>
  static void run(const Case& s, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
                  int64_t ldc, const T* bias) {
    const Storage storage = sizeof(T) == 4 ? Storage::kF32 : Storage::kF64;
    gemm_packed(PackedGemm<T>{s.trans_a, s.trans_b, s.m, s.n, s.k, static_cast<T>(s.alpha), a,
                              storage, lda, b, storage, ldb, static_cast<T>(s.beta), c, ldc, bias});
  }
};

struct Chosen {
  template <class T>
  static void run(const Case& s, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
                  int64_t ldc, const T* bias) {
    gemm(s.trans_a, s.trans_b, s.m, s.n, s.k, static_cast<T>(s.alpha), a, lda, b, ldb,
         static_cast<T>(s.beta), c, ldc, bias);
  }
};

struct Onednn {
  static void run(const Case& s, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                  int64_t ldc, const float* bias) {
    const OrtrainOnednnGemm arguments{kOrtrainF32,
                                      s.trans_a,
                                      s.trans_b,
                                      s.m,
                                      s.n,
                                      s.k,
                                      static_cast<float>(s.alpha),
                                      a,
                                      lda,
                                      b,
                                      ldb,
                                      static_cast<float>(s.beta),
                                      c,
                                      ldc,
                                      bias};
    check_onednn(onednn()->gemm(&arguments), "gemm");
  }
};

template <class T>
std::vector<T> random_values(int64_t n, uint32_t seed) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<T> distribution(-1, 1);
  std::vector<T> values(n);
  for (T& v : values) v = distribution(engine);
  return values;
}

template <class Backend, class T>
void expect_right(const Case& s) {
  SCOPED_TRACE(::testing::Message() << s.m << "x" << s.n << "x" << s.k << (s.trans_a ? " T" : " N")
                                    << (s.trans_b ? "T" : "N") << " alpha " << s.alpha << " beta "
                                    << s.beta << " bias " << s.bias << " pad " << s.pad);
  const int64_t lda = (s.trans_a ? s.m : s.k) + s.pad;
  const int64_t ldb = (s.trans_b ? s.k : s.n) + s.pad;
  const int64_t ldc = s.n + s.pad;
  auto a = random_values<T>((s.trans_a ? s.k : s.m) * lda, 1);
  auto b = random_values<T>((s.trans_b ? s.n : s.k) * ldb, 2);
  auto c = random_values<T>(s.m * ldc, 3);
  const auto bias = random_values<T>(s.n, 4);
  auto want = c;
  for (int64_t i = 0; i < s.m; ++i) {
    for (int64_t j = 0; j < s.n; ++j) {
      long double sum = 0;
      for (int64_t p = 0; p < s.k; ++p) {
        sum += static_cast<long double>(s.trans_a ? a[p * lda + i] : a[i * lda + p]) *
               static_cast<long double>(s.trans_b ? b[j * ldb + p] : b[p * ldb + j]);
      }
      sum *= s.alpha;
      if (s.beta != 0) sum += s.beta * c[i * ldc + j];
      if (s.bias) sum += bias[j];
      want[i * ldc + j] = static_cast<T>(sum);
    }
  }
  // beta = 0 must not read C.
  if (s.beta == 0) {
    for (int64_t i = 0; i < s.m; ++i) {
      for (int64_t j = 0; j < s.n; ++j) {
        c[i * ldc + j] = std::numeric_limits<T>::quiet_NaN();
      }
    }
  }
  Backend::run(s, a.data(), lda, b.data(), ldb, c.data(), ldc, s.bias ? bias.data() : nullptr);
  const double tolerance = std::numeric_limits<T>::epsilon() * (8 + static_cast<double>(s.k));
  for (int64_t i = 0; i < s.m; ++i) {
    for (int64_t j = 0; j < ldc; ++j) {
      const double got = c[i * ldc + j];
      ASSERT_LE(std::abs(got - want[i * ldc + j]), tolerance) << i << ", " << j;
    }
  }
}

template <class Backend, class T>
void expect_all_right() {
  const int64_t sizes[] = {0, 1, 2, 5, 7, 8, 9, 17, 33};
  for (int mode = 0; mode < 4; ++mode) {
    const bool ta = mode & 1;
    const bool tb = mode & 2;
    for (int64_t m : sizes) {
      for (int64_t n : sizes) {
        for (int64_t k : {0, 1, 7, 17}) expect_right<Backend, T>({m, n, k, ta, tb});
      }
    }
    expect_right<Backend, T>({31, 65, 19, ta, tb, 0.5, 1.0, false, 3});
    expect_right<Backend, T>({15, 70, 40, ta, tb, 1.0, 0.0, true, 5});
    expect_right<Backend, T>({3, 40, 21, ta, tb, -2.0, 0.25, true, 1});
    expect_right<Backend, T>({40, 3, 21, ta, tb, -2.0, 0.25, true, 1});
    expect_right<Backend, T>({100, 130, 900, ta, tb, 1.0, 1.0, true});
    expect_right<Backend, T>({150, 260, 70, ta, tb, 1.0, 0.0, true});
    expect_right<Backend, T>({1, 300, 200, ta, tb, 1.0, 1.0, true});
    expect_right<Backend, T>({300, 1, 200, ta, tb, 1.0, 1.0, true});
  }
}

TEST(Gemm, PackedFloatOnEveryTarget) {
  for_each_target([] { expect_all_right<Packed, float>(); });
}

TEST(Gemm, PackedDoubleOnEveryTarget) {
  for_each_target([] { expect_all_right<Packed, double>(); });
}

TEST(Gemm, ChosenBackend) {
  expect_all_right<Chosen, float>();
  expect_all_right<Chosen, double>();
}

// The library counts bytes in int; products of extents may be more than int64 has.
TEST(Gemm, BackendOfHugeMatrices) {
  constexpr int64_t kFloats = int64_t{1} << 29, kCube = int64_t{1} << 21;
  EXPECT_EQ(gemm_backend_for(Storage::kF32, kFloats, 64, 64), GemmBackend::kPacked);
  EXPECT_EQ(gemm_backend_for(Storage::kF32, 64, kFloats, 64), GemmBackend::kPacked);
  EXPECT_EQ(gemm_backend_for(Storage::kF32, 64, 64, kFloats), GemmBackend::kPacked);
  EXPECT_EQ(gemm_backend_for(Storage::kBF16, 2 * kFloats, 64, 64), GemmBackend::kPacked);
  EXPECT_EQ(gemm_backend_for(Storage::kF32, kCube, kCube, kCube),
            gemm_backend_for(Storage::kF32, 1024, 1024, 1024));
}

TEST(Gemm, Onednn) {
  if (onednn() == nullptr) GTEST_SKIP() << onednn_missing_reason();
  for (int mode = 0; mode < 4; ++mode) {
    const bool ta = mode & 1;
    const bool tb = mode & 2;
    for (int repeat = 0; repeat < 2; ++repeat) {  // the second call takes the kept primitive
      expect_right<Onednn, float>({31, 65, 19, ta, tb, 0.5, 1.0, false, 3});
      expect_right<Onednn, float>({15, 70, 40, ta, tb, 1.0, 0.0, true, 5});
      expect_right<Onednn, float>({40, 3, 21, ta, tb, -2.0, 0.25, true, 1});
      expect_right<Onednn, float>({100, 130, 900, ta, tb, 1.0, 1.0, true});
    }
  }
}

TEST(Gemm, OnednnErrorsArriveAsExceptions) {
  if (onednn() == nullptr) GTEST_SKIP() << onednn_missing_reason();
  float value = 0;
  const OrtrainOnednnGemm bad{kOrtrainF32, 0,      0, 2,    2,      2, 1.0f,   &value,
                              -1,          &value, 2, 0.0f, &value, 2, nullptr};
  EXPECT_NE(onednn()->gemm(&bad), 0);
  EXPECT_NE(std::string(onednn()->last_error()), "");
}

TEST(Gemm, PackedResultDoesNotDependOnThreads) {
  const int64_t m = 150, n = 170, k = 800;
  const auto a = random_values<float>(m * k, 1);
  const auto b = random_values<float>(k * n, 2);
  const int before = omp_get_max_threads();
  std::vector<float> first;
  for (int threads : {1, 2, 3}) {
    omp_set_num_threads(threads);
    std::vector<float> c(m * n);
    Packed::run<float>({m, n, k, false, false}, a.data(), k, b.data(), n, c.data(), n, nullptr);
    if (first.empty()) first = c;
    EXPECT_EQ(c, first) << threads;
  }
  omp_set_num_threads(before);
}

// Against float, within the rounding of the result.
void expect_sixteen_bits_right(Storage storage, const Case& s) {
  SCOPED_TRACE(::testing::Message() << s.m << "x" << s.n << "x" << s.k << (s.trans_a ? " T" : " N")
                                    << (s.trans_b ? "T" : "N") << " alpha " << s.alpha << " beta "
                                    << s.beta << " bias " << s.bias);
  auto narrowed = [&](int64_t count, uint32_t seed) {
    const auto values = random_values<float>(count, seed);
    std::vector<uint16_t> out(count);
    narrow(storage, values.data(), out.data(), count);
    return out;
  };
  auto widened = [&](const std::vector<uint16_t>& v) {
    std::vector<float> out(v.size());
    widen(storage, v.data(), out.data(), static_cast<int64_t>(v.size()));
    return out;
  };
  const auto a = narrowed(s.m * s.k, 1);
  const auto b = narrowed(s.k * s.n, 2);
  const auto bias = narrowed(s.n, 3);
  auto c = narrowed(s.m * s.n, 4);
  const int64_t lda = s.trans_a ? s.m : s.k;
  const int64_t ldb = s.trans_b ? s.k : s.n;
  const auto alpha = static_cast<float>(s.alpha);
  const auto beta = static_cast<float>(s.beta);
  auto want = widened(c);
  if (s.beta == 0) {  // must not read C
    for (uint16_t& value : c) value = storage == Storage::kBF16 ? 0x7fc0 : 0x7e00;
  }
  gemm(s.trans_a, s.trans_b, s.m, s.n, s.k, alpha, widened(a).data(), lda, widened(b).data(), ldb,
       beta, want.data(), s.n, s.bias ? widened(bias).data() : nullptr);
  gemm(storage, s.trans_a, s.trans_b, s.m, s.n, s.k, alpha, a.data(), lda, b.data(), ldb, beta,
       c.data(), s.n, s.bias ? bias.data() : nullptr);
  const auto got = widened(c);
  const float step = storage == Storage::kBF16 ? 0.01f : 0.002f;
  for (int64_t i = 0; i < s.m * s.n; ++i) {
    ASSERT_NEAR(got[i], want[i], step * (1 + std::abs(want[i])));
  }
}

TEST(Gemm, SixteenBitStorage) {
  for (Storage storage : {Storage::kBF16, Storage::kF16}) {
    for (int mode = 0; mode < 4; ++mode) {
      const bool ta = mode & 1;
      const bool tb = mode & 2;
      for (auto [m, n, k] : {std::tuple{1, 1, 1},
                             {7, 9, 17},
                             {33, 65, 600},
                             {0, 3, 2},
                             {3, 2, 0},
                             {600, 40, 8},
                             {1, 300, 200},
                             {31, 33, 1100}}) {
        expect_sixteen_bits_right(storage, {m, n, k, ta, tb, 0.5, 2.0, true});
        expect_sixteen_bits_right(storage, {m, n, k, ta, tb, 1.0, 0.0, true});
        expect_sixteen_bits_right(storage, {m, n, k, ta, tb, 1.0, 1.0, false});
        expect_sixteen_bits_right(storage, {m, n, k, ta, tb, -0.5, 0.25, false});
      }
    }
  }
}

TEST(Gemm, BatchedWithSharedOperand) {
  const int64_t m = 9, n = 17, k = 8, count = 7;
  const auto a = random_values<double>(count * m * k, 1);
  const auto b = random_values<double>(2 * k * n, 2);
  std::vector<int64_t> oa, ob, oc;
  for (int64_t i = 0; i < count; ++i) {
    oa.push_back(i * m * k);
    ob.push_back(i % 2 * k * n);
    oc.push_back(i * m * n);
  }
  const GemmBatch batch{count, oa.data(), ob.data(), oc.data()};
  std::vector<double> c(count * m * n);
  std::vector<double> want(m * n);
  gemm_batched(batch, false, false, m, n, k, 1.0, a.data(), k, b.data(), n, 0.0, c.data(), n);
  for (int64_t i = 0; i < count; ++i) {
    gemm(false, false, m, n, k, 1.0, a.data() + oa[i], k, b.data() + ob[i], n, 0.0, want.data(), n);
    for (int64_t j = 0; j < m * n; ++j) ASSERT_EQ(c[oc[i] + j], want[j]);
  }
  const std::vector<float> fa(a.begin(), a.end()), fb(b.begin(), b.end());
  std::vector<float> fc(count * m * n);
  gemm_batched(batch, false, false, m, n, k, 1.0f, fa.data(), k, fb.data(), n, 0.0f, fc.data(), n);
  for (size_t j = 0; j < c.size(); ++j) ASSERT_NEAR(fc[j], c[j], 1e-5);
}

// Enough products that each thread takes whole ones: the library runs inside a parallel region.
TEST(Gemm, BatchOfLargerProducts) {
  const int64_t m = 70, n = 66, k = 50, count = 12;
  const auto a = random_values<float>(count * m * k, 1);
  const auto b = random_values<float>(count * k * n, 2);
  std::vector<int64_t> oa, ob, oc;
  for (int64_t i = 0; i < count; ++i) {
    oa.push_back(i * m * k);
    ob.push_back(i * k * n);
    oc.push_back(i * m * n);
  }
  std::vector<float> c(count * m * n);
  gemm_batched(GemmBatch{count, oa.data(), ob.data(), oc.data()}, false, true, m, n, k, 2.0f,
               a.data(), k, b.data(), k, 0.0f, c.data(), n);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t r = 0; r < m; ++r) {
      for (int64_t q = 0; q < n; ++q) {
        double sum = 0;
        for (int64_t p = 0; p < k; ++p) {
          sum += static_cast<double>(a[oa[i] + r * k + p]) * b[ob[i] + q * k + p];
        }
        ASSERT_NEAR(c[oc[i] + r * n + q], 2 * sum, 1e-4);
      }
    }
  }
}

}  // namespace
}  // namespace ortrain::cpu
