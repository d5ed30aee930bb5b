// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>
#include <thread>
#include <vector>

// Bugs on purpose: tools/run_sanitizers.py and tools/run_thread_sanitizer.py run these and expect
// reports.
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

TEST(Sanitizer, DISABLED_RacesForAnInt) {
  int value = 0;
  std::thread other([&] { ++value; });
  ++value;
  other.join();
  EXPECT_EQ(value, 2);
}

}  // namespace
}  // namespace ortrain
