// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdlib>

namespace ortrain {
namespace {

// Each graph and each plan that a test makes is verified.
class Verification : public ::testing::Environment {
 public:
  void SetUp() override { ::setenv("ORTRAIN_VERIFY", "1", /*overwrite=*/0); }
};

const ::testing::Environment* const kVerification =
    ::testing::AddGlobalTestEnvironment(new Verification);

}  // namespace
}  // namespace ortrain
