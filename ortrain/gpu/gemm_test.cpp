// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/gpu/cublaslt.h"
#include "ortrain/gpu/gemm_samples_test.h"

namespace ortrain::gpu {
namespace {

TEST(Gemm, EqualsReference) {
  for (const GemmProblem& p : problems()) {
    SCOPED_TRACE(str(p.m, " ", p.n, " ", p.k, " ", p.trans_a, p.trans_b));
    check_gemm(p);
  }
}

TEST(Gemm, TakesAddressesOfSingleElements) {
  for (const bool trans : {false, true}) {
    check_gemm({.m = 40, .n = 64, .k = 72, .trans_a = trans, .trans_b = !trans}, "tiled", 1);
  }
}

TEST(Gemm, LargeTiles) {
  for (const bool trans_a : {false, true}) {
    for (const bool trans_b : {false, true}) {
      check_gemm(
          {.m = 133, .n = 260, .k = 75, .trans_a = trans_a, .trans_b = trans_b, .alpha = 0.25});
    }
  }
}

TEST(Gemm, Activations) {
  for (const Activation activation : {Activation::relu, Activation::gelu, Activation::gelu_tanh}) {
    GemmProblem p{.m = 70,
                  .n = 40,
                  .k = 9,
                  .alpha = 0.25,
                  .bias = BiasAlong::columns,
                  .activation = activation,
                  .keep_aux = true};
    check_gemm(p);
    p.batch = {{2, 630, 0, 0, 2800}};
    p.keep_aux = false;
    p.bias_gradient = true;
    check_gemm(p);
    p.bias = BiasAlong::none;
    p.activation_gradient = true;
    check_gemm(p);
  }
}

TEST(Gemm, ColumnSumsOfNoRows) {
  const Gemm gemm({.m = 0, .n = 3, .k = 2, .bias_gradient = true});
  std::vector<float> sums(3, 5.0f);
  gemm.run({.bias_gradient = sums.data()}, nullptr, nullptr);
  EXPECT_EQ(sums, std::vector<float>(3, 0.0f));
}

TEST(Gemm, KeepsSums) {
  for (const char* path : {"", ORTRAIN_CUBLASLT_STAND_IN}) {
    set_cublaslt_path(path);
    for (const int64_t k : {9, 1030}) {  // in one part, in several
      const auto a = numbers(2 * 5 * k, 3), b = numbers(k * 7, 5);
      const auto left = rounded<BFloat16>(a), right = rounded<BFloat16>(b);
      GemmProblem p{.dtype = DType::f64, .m = 5, .n = 7, .k = k, .batch = {{2, 5 * k, 0, 0, 35}}};
      const Result wanted = expected(p, a, b, {}, {}, {});
      p.dtype = DType::bf16;
      p.keep_sums = true;
      const Gemm gemm(p);
      EXPECT_EQ(gemm.algorithm(), *path == 0 ? "tiled" : "cublaslt");
      std::vector<float> d(70);
      std::vector<double> workspace(gemm.workspace_bytes().value() / sizeof(double) + 1);
      gemm.run({.a = left.data(), .b = right.data(), .d = d.data()}, workspace.data(), nullptr);
      expect_near(d, wanted.d, 1e-6, "D");
    }
  }
  set_cublaslt_path("");
}

TEST(Gemm, AddsToSumsThatWereKept) {
  for (const char* path : {"", ORTRAIN_CUBLASLT_STAND_IN}) {
    set_cublaslt_path(path);
    for (const int64_t k : {9, 1030}) {
      const auto a = numbers(2 * 5 * k, 3), b = numbers(k * 7, 5), c = numbers(70, 7);
      const auto left = rounded<BFloat16>(a), right = rounded<BFloat16>(b);
      GemmProblem p{.dtype = DType::f64,
                    .m = 5,
                    .n = 7,
                    .k = k,
                    .beta = 1.0,
                    .batch = {{2, 5 * k, 0, 35, 35}}};
      const Result wanted = expected(p, a, b, c, {}, {});
      p.dtype = DType::bf16;
      p.keep_sums = true;
      const Gemm gemm(p);
      EXPECT_EQ(gemm.algorithm(), *path == 0 ? "tiled" : "cublaslt");
      std::vector<float> d(c.begin(), c.end());
      std::vector<double> workspace(gemm.workspace_bytes().value() / sizeof(double) + 1);
      gemm.run({.a = left.data(), .b = right.data(), .d = d.data(), .c = d.data()},
               workspace.data(), nullptr);
      expect_near(d, wanted.d, 1e-6, "D");
    }
  }
  set_cublaslt_path("");
}

TEST(Gemm, IntegersWrapAround) {
  const Gemm gemm({.dtype = DType::i32, .m = 1, .n = 1, .k = 2});
  const std::vector<int32_t> a{1 << 30, -3}, b{6, 5};
  int32_t d = 0;
  gemm.run({.a = a.data(), .b = b.data(), .d = &d}, nullptr, nullptr);
  EXPECT_EQ(d, static_cast<int32_t>((uint32_t{6} << 30) - 15));
}

TEST(Gemm, RefusesContradictions) {
  EXPECT_THROW(Gemm({.m = 2, .n = 2, .k = 4, .lda = 3}), InternalError);
  EXPECT_THROW(Gemm({.dtype = DType::i64, .m = 2, .n = 2, .k = 4, .beta = 1.0}), InternalError);
  EXPECT_THROW(Gemm({.m = 2, .n = 2, .k = 4, .keep_aux = true}), InternalError);
  EXPECT_THROW(Gemm({.m = 2, .n = 2, .k = 4, .ldd = 3, .keep_sums = true}), InternalError);
  EXPECT_THROW(Gemm({.m = 2, .n = 2, .k = 4, .beta = 0.5, .keep_sums = true}), InternalError);
}

// --- cuBLASLt, on a stand-in for the library that reads the same descriptions

class GemmByLibrary : public ::testing::Test {
 protected:
  void SetUp() override { set_cublaslt_path(ORTRAIN_CUBLASLT_STAND_IN); }
  void TearDown() override { set_cublaslt_path(""); }
};

TEST_F(GemmByLibrary, EqualsReference) {
  for (const GemmProblem& p : problems()) {
    SCOPED_TRACE(str(p.m, " ", p.n, " ", p.k, " ", p.trans_a, p.trans_b));
    check_gemm(p, p.k == 0 ? "tiled" : "cublaslt");
  }
}

TEST_F(GemmByLibrary, Activations) {
  for (const Activation activation : {Activation::relu, Activation::gelu, Activation::gelu_tanh}) {
    GemmProblem p{.m = 7,
                  .n = 40,
                  .k = 9,
                  .alpha = 0.25,
                  .bias = BiasAlong::columns,
                  .activation = activation};
    check_gemm(p, "cublaslt");
    p.keep_aux = true;
    check_gemm(p, "cublaslt");
    p.n = 41;  // no rows for the library's aux
    check_gemm(p, "cublaslt");
    p.n = 40;
    p.keep_aux = false;
    p.bias = BiasAlong::none;
    p.activation_gradient = true;
    check_gemm(p, "cublaslt");
    p.bias_gradient = true;
    check_gemm(p, "cublaslt");
    p.batch = {{2, 63, 0, 0, 280}};
    check_gemm(p, "cublaslt");
  }
}

// The stand-in has no algorithm for addresses that are multiples of less than 4 bytes.
TEST_F(GemmByLibrary, TilesTakeWhatItRefuses) {
  check_gemm({.m = 4, .n = 6, .k = 8}, "cublaslt", 1);
}

TEST_F(GemmByLibrary, TilesTakeBatchesThatItCannotCount) {
  const auto algorithm = [](int64_t count) {
    return Gemm({.m = 4, .n = 6, .k = 8, .batch = {{count, 32, 48, 0, 24}}}).algorithm();
  };
  EXPECT_EQ(algorithm(2), "cublaslt");
  EXPECT_EQ(algorithm((int64_t{1} << 32) + 2), "tiled");  // 2 in 32 bits
}

TEST(Cublaslt, SaysWhyItIsNotThere) {
  std::string why;
  set_cublaslt_path("/nowhere/libcublasLt.so.13");
  EXPECT_EQ(Cublaslt::find(why), nullptr);
  EXPECT_NE(why.find("/nowhere/libcublasLt.so.13"), std::string::npos) << why;
  set_cublaslt_path("");
  EXPECT_EQ(Cublaslt::find(why), nullptr);
  EXPECT_NE(why.find("no libcublasLt"), std::string::npos) << why;
}

}  // namespace
}  // namespace ortrain::gpu
