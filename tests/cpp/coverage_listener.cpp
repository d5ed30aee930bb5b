// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// In a build with ORTRAIN_COVERAGE: what runs before the first test, registrations above all, is part of every
// program, and tells nothing of the tests that this one was asked to run.
#include <gtest/gtest.h>

extern "C" void ortrain_coverage_take(const char* folder);

namespace {

class CoverageListener : public ::testing::EmptyTestEventListener {
 public:
  void OnTestProgramStart(const ::testing::UnitTest&) override { ortrain_coverage_take(nullptr); }
};

const bool kListening = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new CoverageListener);
  return true;
}();

}  // namespace
