// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/kernel_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "ortrain/base/private_folder.h"

namespace ortrain::gpu {
namespace {

namespace fs = std::filesystem;

class KernelCacheTest : public ::testing::Test {
 protected:
  KernelCacheTest() {
    std::string pattern = (fs::temp_directory_path() / "ortrain-cache-XXXXXX").string();
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    folder_ = (root_ / "a" / "kernels").string();
  }
  ~KernelCacheTest() override { fs::remove_all(root_); }

  fs::path file_of(const std::string& key) const {
    return fs::path(folder_) / KernelCache::file_name(key);
  }
  static std::string contents(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  static void store(const KernelCache& cache, const std::string& key, const std::string& code) {
    std::string why;
    EXPECT_TRUE(cache.store(key, code, &why)) << why;
  }

  fs::path root_;
  std::string folder_;
};

TEST_F(KernelCacheTest, FindsWhatItStored) {
  const KernelCache cache(folder_);
  EXPECT_EQ(cache.find("key"), std::nullopt);
  const std::string code("co\0de", 5);
  store(cache, "key", code);
  EXPECT_EQ(cache.find("key"), code);
  EXPECT_EQ(KernelCache(folder_).find("key"), code);
  EXPECT_EQ(cache.find("other key"), std::nullopt);
  EXPECT_EQ(fs::status(folder_).permissions(), fs::perms::owner_all);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
  store(cache, "key", "later");
  EXPECT_EQ(cache.find("key"), "later");
}

TEST_F(KernelCacheTest, NoFolderNoCache) {
  const KernelCache cache("");
  store(cache, "key", "code");
  EXPECT_EQ(cache.find("key"), std::nullopt);
}

TEST_F(KernelCacheTest, DamagedFilesAreNotUsedAndWrittenAnew) {
  const KernelCache cache(folder_);
  store(cache, "key", "the code");
  const std::string whole = contents(file_of("key"));
  std::vector<std::string> damaged = {"", "x", whole.substr(0, whole.size() - 1), whole + "x"};
  for (const size_t at :
       {size_t{0}, size_t{9}, size_t{17}, size_t{26}, whole.size() - 12, whole.size() - 1}) {
    damaged.push_back(whole);
    damaged.back()[at] ^= 1;
  }
  for (const std::string& bytes : damaged) {
    std::ofstream(file_of("key"), std::ios::binary) << bytes;
    EXPECT_EQ(cache.find("key"), std::nullopt);
    store(cache, "key", "the code");
    EXPECT_EQ(cache.find("key"), "the code");
  }
  // The file of another key under this one's name.
  store(cache, "other", "other code");
  fs::copy_file(file_of("other"), file_of("key"), fs::copy_options::overwrite_existing);
  EXPECT_EQ(cache.find("key"), std::nullopt);
}

TEST_F(KernelCacheTest, WhatOthersCouldHaveWrittenIsNotUsed) {
  const KernelCache cache(folder_);
  store(cache, "key", "code");
  ASSERT_EQ(chmod(folder_.c_str(), 0770), 0);
  EXPECT_EQ(cache.find("key"), std::nullopt);
  std::string why;
  EXPECT_FALSE(cache.store("key", "code", &why));
  EXPECT_THAT(why, ::testing::HasSubstr("open to other users"));
  ASSERT_EQ(chmod(folder_.c_str(), 0700), 0);
  EXPECT_EQ(cache.find("key"), "code");

  // Neither a link in place of the folder nor one in place of the file.
  fs::create_directory_symlink(folder_, root_ / "link");
  EXPECT_EQ(KernelCache((root_ / "link").string()).find("key"), std::nullopt);
  fs::rename(file_of("key"), root_ / "elsewhere");
  fs::create_symlink(root_ / "elsewhere", file_of("key"));
  EXPECT_EQ(cache.find("key"), std::nullopt);

  if (geteuid() == 0) {
    ASSERT_EQ(chown(folder_.c_str(), 12345, 12345), 0);
    EXPECT_FALSE(PrivateFolder::open(folder_, false, &why).has_value());
    EXPECT_THAT(why, ::testing::HasSubstr("another user"));
  }
}

TEST_F(KernelCacheTest, WritersDoNotDisturbReaders) {
  const KernelCache cache(folder_);
  const std::string first(100000, 'a');
  const std::string second(200000, 'b');
  store(cache, "key", first);
  std::vector<std::thread> writers;
  for (const std::string* code : {&first, &second}) {
    writers.emplace_back([&cache, code] {
      for (int i = 0; i < 50; ++i) store(cache, "key", *code);
    });
  }
  for (int i = 0; i < 100; ++i) {
    const std::optional<std::string> found = cache.find("key");
    ASSERT_TRUE(found.has_value());
    EXPECT_TRUE(*found == first || *found == second);
  }
  for (std::thread& writer : writers) writer.join();
}

}  // namespace
}  // namespace ortrain::gpu
