// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>
#include <vector>

// Bugs on purpose: tools/run_sanitizers.py runs these and expects that each ends the process.
namespace ortrain {
namespace {

TEST(Sanitizer, DISABLED_ReadsPastTheEnd) {
  const std::vector<int> values(4, 1);
  const volatile int* data = values.data();
  EXPECT_EQ(data[values.size()], 0);
}

TEST(Sanitizer, DISABLED_OverflowsAnInt) {
  volatile int most = std::numeric_limits<int>::max();
  EXPECT_LT(most + 1, 0);
}

}  // namespace
}  // namespace ortrain
