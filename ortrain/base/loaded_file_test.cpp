// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/loaded_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>

namespace ortrain {
namespace {

TEST(FolderOfLoadedFile, IsThatOfTheProgramWhereverTheProcessGoes) {
  const std::string expected =
      std::filesystem::read_symlink("/proc/self/exe").parent_path().string() + "/";
  const std::filesystem::path before = std::filesystem::current_path();
  static const int own = 0;
  EXPECT_EQ(folder_of_loaded_file(&own), expected);
  std::filesystem::current_path("/");
  EXPECT_EQ(folder_of_loaded_file(&own), expected);
  std::filesystem::current_path(before);
}

TEST(FolderOfLoadedFile, MemoryOfNoFileHasNone) {
  const auto heap = std::make_unique<int>(0);
  EXPECT_EQ(folder_of_loaded_file(heap.get()), "");
  EXPECT_EQ(folder_of_loaded_file(nullptr), "");
}

}  // namespace
}  // namespace ortrain
