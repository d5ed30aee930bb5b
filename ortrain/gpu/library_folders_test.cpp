// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/library_folders.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "ortrain/base/error.h"

namespace ortrain::gpu {
namespace {

const std::filesystem::path kLibrary = ORTRAIN_CUBLASLT_STAND_IN;

TEST(LibraryFolders, ALibraryIsFoundInAFolder) {
  std::string why;
  const std::string name = kLibrary.filename().string();
  set_library_folders({"/nowhere", kLibrary.parent_path().string()});
  EXPECT_NE(open_library(name, why), nullptr) << why;
  EXPECT_EQ(open_library("libortrain_that_is_missing.so.1", why), nullptr);
  EXPECT_NE(why.find("libortrain_that_is_missing.so.1"), std::string::npos) << why;
  set_library_folders({});
}

TEST(LibraryFolders, RelativeFoldersAreRefused) {
  EXPECT_THROW(set_library_folders({"lib"}), InvalidModelError);
  EXPECT_THROW(set_library_folders({""}), InvalidModelError);
}

}  // namespace
}  // namespace ortrain::gpu
