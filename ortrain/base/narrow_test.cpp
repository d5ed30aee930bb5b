// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/narrow.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace ortrain {
namespace {

TEST(NarrowChecked, KeepsWhatFits) {
  EXPECT_EQ(narrow_checked<int32_t>(std::numeric_limits<int32_t>::max()), 2147483647);
  EXPECT_EQ(narrow_checked<int32_t>(std::numeric_limits<int32_t>::min()), -2147483647 - 1);
  EXPECT_EQ(narrow_checked<uint32_t>((int64_t{1} << 32) - 1), 4294967295u);
  EXPECT_EQ(narrow_checked<int64_t>(int64_t{1} << 40), int64_t{1} << 40);
}

TEST(NarrowChecked, NamesWhatDoesNotFit) {
  EXPECT_FALSE(fits<int32_t>(int64_t{1} << 31));
  EXPECT_FALSE(fits<uint32_t>(-1));
  EXPECT_FALSE(fits<uint32_t>(int64_t{1} << 32));
  EXPECT_THROW(narrow_checked<uint32_t>(-1), UnsupportedError);
  try {
    narrow_checked<int32_t>((int64_t{1} << 32) + 3);  // 3 in 32 bits
    FAIL() << "4294967299 in 32 bits";
  } catch (const UnsupportedError& error) {
    EXPECT_NE(std::string(error.what()).find("4294967299"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace ortrain
