// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

// clang-format off: the list of targets comes before any Highway header.
#include "ortrain/cpu/simd/targets.h"
#include "hwy/base.h"
#include "hwy/targets.h"
// clang-format on

#include <cstdint>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

namespace ortrain::cpu {
namespace {

class HighwayDispatch : public testing::Test {
 protected:
  ~HighwayDispatch() override {
    hwy::DisableTargets(0);
    hwy::SetSupportedTargetsForTest(0);
  }
};

TEST_F(HighwayDispatch, TheBaselineIsAlwaysSupported) {
  EXPECT_EQ(hwy::SupportedTargets() & HWY_ENABLED_BASELINE, HWY_ENABLED_BASELINE);
}

#if HWY_ARCH_X86 && defined(__linux__)
// The kernel's own reading of the processor, which leaves out what it does not save.
TEST_F(HighwayDispatch, FindsWhatTheKernelFinds) {
  std::ifstream file("/proc/cpuinfo");
  std::set<std::string> flags;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    for (std::string word; words >> word;) flags.insert(word);
    break;
  }
  if (flags.empty()) GTEST_SKIP() << "/proc/cpuinfo lists no flags";
  const auto has = [&](std::initializer_list<const char*> names) {
    for (const char* name : names) {
      if (flags.count(name) == 0) return false;
    }
    return true;
  };
  const bool avx2 = has({"ssse3", "sse4_1", "sse4_2", "pclmulqdq", "aes", "avx", "avx2", "fma",
                         "f16c", "bmi1", "bmi2"});
  const bool avx512 = avx2 && has({"avx512f", "avx512vl", "avx512dq", "avx512bw", "avx512cd"});
  EXPECT_EQ((hwy::SupportedTargets() & HWY_AVX2) != 0, avx2);
  EXPECT_EQ((hwy::SupportedTargets() & HWY_AVX3) != 0, avx512);
}
#endif

TEST_F(HighwayDispatch, DisabledTargetsAreLeftOut) {
  const int64_t all = hwy::SupportedTargets();
  const int64_t best = all & -all;
  if (best == HWY_STATIC_TARGET) GTEST_SKIP() << "this processor has the baseline alone";
  hwy::DisableTargets(best);
  EXPECT_EQ(hwy::SupportedTargets(), all & ~best);
  hwy::DisableTargets(0);
  EXPECT_EQ(hwy::SupportedTargets(), all);
}

TEST_F(HighwayDispatch, SomethingIsLeftWhenAllIsDisabled) {
  hwy::DisableTargets(~int64_t{0});
  EXPECT_EQ(hwy::SupportedTargets(), HWY_STATIC_TARGET);
}

TEST_F(HighwayDispatch, ANewSetOfTargetsIsChosenFromAgain) {
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  EXPECT_TRUE(hwy::GetChosenTarget().IsInitialized());
  hwy::SetSupportedTargetsForTest(HWY_STATIC_TARGET);
  EXPECT_FALSE(hwy::GetChosenTarget().IsInitialized());
  EXPECT_EQ(hwy::SupportedTargets(), HWY_STATIC_TARGET);
}

TEST(HighwayDispatchDeathTest, AFailedAssertionSaysWhereAndWhat) {
  EXPECT_DEATH(hwy::Abort("rows.cpp", 7, "Assert %s", "n > 0"), "rows.cpp:7: Assert n > 0");
}

}  // namespace
}  // namespace ortrain::cpu
