// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// The targets compile with every compiler, and what is kept of their inputs runs clean.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz/targets.h"

namespace ortrain::fuzz {
namespace {

class FuzzSeeds : public ::testing::TestWithParam<Target> {};

TEST_P(FuzzSeeds, RunClean) {
  const std::filesystem::path folder =
      std::filesystem::path(ORTRAIN_SOURCE_DIR) / "fuzz" / "seeds" / GetParam().name;
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
    SCOPED_TRACE(entry.path().filename().string());
    EXPECT_NO_THROW(GetParam().run({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}));
    ++count;
  }
  EXPECT_GE(count, 6U);
}

INSTANTIATE_TEST_SUITE_P(Targets, FuzzSeeds, ::testing::ValuesIn(kTargets),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace ortrain::fuzz
