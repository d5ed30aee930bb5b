// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// In a build with ORTRAIN_COVERAGE: which group of tests runs which code. A group is a suite, or the tests of a suite
// for one operator; tools/coverage_map.py reads what is written below ORTRAIN_COVERAGE_DIR.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

extern "C" void ortrain_coverage_take(const char* folder);

namespace {

// The filter that runs the group of a test.
std::string filter_of(const ::testing::TestInfo& info) {
  const std::string suite = info.test_suite_name();
  const std::string name = info.name();
  const size_t slash = name.find('/');
  if (slash == std::string::npos || info.value_param() == nullptr) return suite + ".*";
  size_t end = slash + 1;
  if (name.compare(end, 8, "ortrain_") == 0) end = name.find_first_not_of('_', end + 7);
  while (end < name.size() && std::isalnum(static_cast<unsigned char>(name[end]))) ++end;
  if (end < name.size()) ++end;
  return suite + "." + name.substr(0, end) + "*";
}

class CoverageListener : public ::testing::EmptyTestEventListener {
 public:
  explicit CoverageListener(std::string folder) : folder_(std::move(folder)) {}

  // What runs before the first test, registrations above all, is part of every program.
  void OnTestProgramStart(const ::testing::UnitTest&) override { ortrain_coverage_take(nullptr); }

  void OnTestStart(const ::testing::TestInfo& info) override {
    const std::string filter = filter_of(info);
    if (filter != filter_) take();
    filter_ = filter;
  }

  void OnTestProgramEnd(const ::testing::UnitTest&) override { take(); }

 private:
  void take() {
    if (filter_.empty()) return;
    const std::filesystem::path folder =
        folder_ / ("cpp-" + std::to_string(getpid()) + "-" + std::to_string(taken_++));
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "tests") << filter_ << "\n";
    ortrain_coverage_take(folder.c_str());
  }

  std::filesystem::path folder_;
  std::string filter_;
  int taken_ = 0;
};

const bool kListening = [] {
  const char* const folder = std::getenv("ORTRAIN_COVERAGE_DIR");
  if (folder != nullptr) {
    ::testing::UnitTest::GetInstance()->listeners().Append(new CoverageListener(folder));
  }
  return folder != nullptr;
}();

}  // namespace
