// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/threads.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

namespace ortrain::cpu {
namespace {

class Threads : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    before_ = omp_get_max_threads();
    omp_set_num_threads(GetParam());
  }
  void TearDown() override { omp_set_num_threads(before_); }

 private:
  int before_ = 1;
};
INSTANTIATE_TEST_SUITE_P(Counts, Threads, ::testing::Values(1, 2, 3, 5));

TEST_P(Threads, CoversEveryIndexOnce) {
  for (int64_t n : {0, 1, 2, 7, 100, 1001}) {
    for (int64_t grain : {0, 1, 7, 64, 5000}) {
      std::vector<std::atomic<int>> hits(n);
      parallel_for(n, grain, [&](int64_t begin, int64_t end) {
        EXPECT_LT(begin, end);
        for (int64_t i = begin; i < end; ++i) ++hits[i];
      });
      for (auto& hit : hits) ASSERT_EQ(hit, 1) << n << " by " << grain;
    }
    std::vector<std::atomic<int>> hits(n);
    parallel_blocks(n, [&](int64_t block) { ++hits[block]; });
    for (auto& hit : hits) ASSERT_EQ(hit, 1);
  }
}

TEST_P(Threads, ShortWorkStaysOnTheCallingThread) {
  std::atomic<int> calls = 0;
  parallel_for(63, 64, [&](int64_t, int64_t) { ++calls; });
  EXPECT_EQ(calls, 1);
}

TEST_P(Threads, NestedRegionsAreSerial) {
  std::atomic<int64_t> sum = 0;
  parallel_blocks(4, [&](int64_t) {
    EXPECT_EQ(thread_count(), 1);
    parallel_for(100, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
  });
  EXPECT_EQ(sum, 400);
}

TEST_P(Threads, LowestExceptionReachesTheCaller) {
  try {
    parallel_blocks(40, [](int64_t block) {
      if (block >= 17) throw std::runtime_error(std::to_string(block));
    });
    FAIL() << "no exception";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "17");
  }
  EXPECT_THROW(parallel_for(1000, 1, [](int64_t, int64_t) { throw std::logic_error("x"); }),
               std::logic_error);
}

}  // namespace
}  // namespace ortrain::cpu
