// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/simulator.h"
#include "ortrain/testing/harness.h"

// The cases of all operators on the GPU provider's kernels, run by the simulator.
namespace ortrain::testing {
namespace {

std::string name_of_test(const ::testing::TestParamInfo<OpCase>& info) {
  return test_name(info.param, info.index);
}

// Those with a kernel of the provider's own.
std::vector<OpCase> own_cases(bool with_gradient) {
  std::vector<OpCase> found;
  for (const OpCase& op_case : all_cases().all()) {
    const size_t colons = op_case.op.find("::");
    const std::string domain = colons == std::string::npos ? "" : op_case.op.substr(0, colons);
    const std::string name =
        colons == std::string::npos ? op_case.op : op_case.op.substr(colons + 2);
    const std::vector<Kernel>& kernels = gpu::kernels(0).find(domain, name);
    const bool own = std::ranges::any_of(
        kernels, [](const Kernel& kernel) { return kernel.make && kernel.name != "host"; });
    if (own && (!with_gradient || has_gradient_check(op_case))) found.push_back(op_case);
  }
  return found;
}

class SimulatedCase : public ::testing::TestWithParam<OpCase> {};
class SimulatedGradient : public ::testing::TestWithParam<OpCase> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SimulatedCase);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SimulatedGradient);

TEST_P(SimulatedCase, KernelsEqualReference) {
  for (const gpu::simulator::ThreadOrder order :
       {gpu::simulator::ThreadOrder::ascending, gpu::simulator::ThreadOrder::descending}) {
    gpu::simulator::set_thread_order(order);
    for (const CheckRow& row : check_kernels(GetParam(), gpu::kernels(0))) {
      if (row.refused) continue;
      EXPECT_TRUE(row.passed) << row.name << " " << row.kernel << " " << name_of(row.type) << ": "
                              << row.message;
    }
  }
  gpu::simulator::set_thread_order(gpu::simulator::ThreadOrder::ascending);
}

TEST_P(SimulatedGradient, EqualsFiniteDifference) {
  const CheckRow row = check_gradient(GetParam(), gpu::kernels(0));
  EXPECT_TRUE(row.passed) << row.name << ": " << row.message;
}

INSTANTIATE_TEST_SUITE_P(Ops, SimulatedCase, ::testing::ValuesIn(own_cases(false)), name_of_test);
INSTANTIATE_TEST_SUITE_P(Ops, SimulatedGradient, ::testing::ValuesIn(own_cases(true)),
                         name_of_test);

}  // namespace
}  // namespace ortrain::testing
