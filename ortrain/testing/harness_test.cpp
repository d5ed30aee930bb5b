// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/harness.h"

#include <gtest/gtest.h>

namespace ortrain::testing {
namespace {

std::string name_of_test(const ::testing::TestParamInfo<OpCase>& info) {
  return test_name(info.param, info.index);
}

class OpKernels : public ::testing::TestWithParam<OpCase> {};

TEST_P(OpKernels, AgreeWithReference) {
  for (const CheckRow& row : check_kernels(GetParam(), cpu_kernels())) {
    EXPECT_TRUE(row.passed || row.refused)
        << row.kernel << " " << name_of(row.type) << ": " << row.message;
  }
}

class OpGradients : public ::testing::TestWithParam<OpCase> {};

TEST_P(OpGradients, AgreeWithFiniteDifferences) {
  const CheckRow row = check_gradient(GetParam(), cpu_kernels());
  EXPECT_TRUE(row.passed) << row.message;
}

std::vector<OpCase> cases_with_gradient() {
  std::vector<OpCase> cases;
  for (const OpCase& op_case : all_cases().all()) {
    if (has_gradient_check(op_case)) cases.push_back(op_case);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, OpKernels, ::testing::ValuesIn(all_cases().all()), name_of_test);
INSTANTIATE_TEST_SUITE_P(All, OpGradients, ::testing::ValuesIn(cases_with_gradient()),
                         name_of_test);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(OpKernels);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(OpGradients);

}  // namespace
}  // namespace ortrain::testing
