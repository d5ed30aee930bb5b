// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/onednn.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace ortrain::cpu {
namespace {

std::vector<float> values(int64_t n) {
  std::vector<float> result(n);
  for (int64_t i = 0; i < n; ++i) result[i] = static_cast<float>(i * 37 % 101) / 101 - 0.5f;
  return result;
}

// Leaves OpenMP as it was.
class Onednn : public ::testing::Test {
 protected:
  void SetUp() override {
    if (onednn() == nullptr) GTEST_SKIP() << onednn_missing_reason();
    omp_set_num_threads(4);
  }
  void TearDown() override {
    omp_set_num_threads(threads_);
    omp_set_dynamic(dynamic_);
    omp_set_max_active_levels(levels_);
  }

  // `run` gives the same wherever it is called, and leaves OpenMP's settings as they are.
  static void expect_same_by_any_team(const std::function<std::vector<float>()>& run) {
    const std::vector<float> expected = run();
    const auto expect_same = [&](const char* where) {
      const int threads = omp_get_max_threads(), dynamic = omp_get_dynamic();
      const std::vector<float> actual = run();
      EXPECT_EQ(omp_get_max_threads(), threads) << where;
      EXPECT_EQ(omp_get_dynamic(), dynamic) << where;
      ASSERT_EQ(actual.size(), expected.size());
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_NEAR(actual[i], expected[i], 1e-3) << where << ", " << i;
      }
    };
#pragma omp parallel num_threads(2)
    {
#pragma omp single
      expect_same("in a parallel region");
    }
#pragma omp parallel num_threads(1)
    expect_same("in a region of one thread");
    omp_set_dynamic(1);
    expect_same("where teams are dynamic");
    omp_set_dynamic(0);
    const int levels = omp_get_max_active_levels();
    omp_set_max_active_levels(0);
    expect_same("where no region is active");
    omp_set_max_active_levels(levels);
    for (const int threads : {1, 3, 4}) {
      omp_set_num_threads(threads);
      expect_same("by another number of threads");
    }
  }

 private:
  int threads_ = omp_get_max_threads();
  int dynamic_ = omp_get_dynamic();
  int levels_ = omp_get_max_active_levels();
};

TEST_F(Onednn, ProductsAreRightByAnyTeam) {
  constexpr int64_t kM = 200, kN = 170, kK = 300;
  const std::vector<float> a = values(kM * kK), b = values(kK * kN);
  for (const int trans_b : {0, 1}) {
    expect_same_by_any_team([&] {
      std::vector<float> c(kM * kN);
      const OrtrainOnednnGemm gemm{.type = kOrtrainF32,
                                   .trans_a = 0,
                                   .trans_b = trans_b,
                                   .m = kM,
                                   .n = kN,
                                   .k = kK,
                                   .alpha = 1.0f,
                                   .a = a.data(),
                                   .lda = kK,
                                   .b = b.data(),
                                   .ldb = trans_b ? kK : kN,
                                   .beta = 0.0f,
                                   .c = c.data(),
                                   .ldc = kN,
                                   .bias = nullptr};
      check_onednn(onednn()->gemm(&gemm), "gemm");
      return c;
    });
  }
}

TEST_F(Onednn, ConvolutionsAreRightByAnyTeam) {
  constexpr int64_t kBatch = 3, kChannels = 16, kSize = 20;
  const std::vector<float> image = values(kBatch * kChannels * kSize * kSize);
  const std::vector<float> weight = values(kChannels * kChannels * 9);
  for (const int32_t kind :
       {kOrtrainConvForward, kOrtrainConvBackwardData, kOrtrainConvBackwardWeights}) {
    OrtrainOnednnConv description{.kind = kind,
                                  .spatial = 2,
                                  .has_bias = 0,
                                  .batch = kBatch,
                                  .in_channels = kChannels,
                                  .out_channels = kChannels,
                                  .groups = 1,
                                  .in = {kSize, kSize, 1},
                                  .kernel = {3, 3, 1},
                                  .out = {kSize, kSize, 1},
                                  .stride = {1, 1, 1},
                                  .dilation = {1, 1, 1},
                                  .pad_begin = {1, 1, 0},
                                  .pad_end = {1, 1, 0}};
    std::string why;
    const std::shared_ptr<OnednnConv> conv = OnednnConv::make(description, &why);
    ASSERT_NE(conv, nullptr) << why;
    const bool of_weights = kind == kOrtrainConvBackwardWeights;
    expect_same_by_any_team([&] {
      std::vector<float> result(of_weights ? weight.size() : image.size());
      const float* in[] = {image.data(), of_weights ? image.data() : weight.data(), nullptr};
      float* out[] = {result.data(), nullptr};
      conv->run(in, out);
      return result;
    });
  }
}

}  // namespace
}  // namespace ortrain::cpu
