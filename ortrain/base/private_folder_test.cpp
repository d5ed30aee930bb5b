// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/private_folder.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

namespace ortrain {
namespace {

TEST(PrivateFolder, ExpandsTheHome) {
  const char* home = std::getenv("HOME");
  const std::string before = home == nullptr ? "" : home;
  setenv("HOME", "/home/somebody", 1);
  EXPECT_EQ(expand_home("~/x"), "/home/somebody/x");
  EXPECT_EQ(expand_home("~"), "/home/somebody");
  EXPECT_EQ(expand_home("/tmp/~/x"), "/tmp/~/x");
  EXPECT_EQ(expand_home("~other/x"), "~other/x");
  unsetenv("HOME");
  EXPECT_EQ(expand_home("~/x"), "");
  if (home != nullptr) setenv("HOME", before.c_str(), 1);
}

TEST(PrivateFolder, SaysWhatItCannotDo) {
  std::string why;
  EXPECT_FALSE(PrivateFolder::open("/no/such/folder", false, &why).has_value());
  EXPECT_NE(why.find("/no/such/folder"), std::string::npos);
  EXPECT_FALSE(PrivateFolder::open("/proc/ortrain/folder", true, &why).has_value());
  EXPECT_NE(why.find("/proc/ortrain/folder"), std::string::npos);

  std::string pattern = (std::filesystem::temp_directory_path() / "ortrain-XXXXXX").string();
  ASSERT_NE(mkdtemp(pattern.data()), nullptr);
  {
    const std::optional<PrivateFolder> folder = PrivateFolder::open(pattern, false, &why);
    ASSERT_TRUE(folder.has_value());
    EXPECT_EQ(folder->read("file"), std::nullopt);
    EXPECT_FALSE(folder->write("missing/file", "x", &why));
    EXPECT_NE(why.find("missing/file"), std::string::npos);
    EXPECT_TRUE(folder->write("file", "contents", &why));
    EXPECT_EQ(folder->read("file"), "contents");
  }
  std::filesystem::remove_all(pattern);
}

}  // namespace
}  // namespace ortrain
