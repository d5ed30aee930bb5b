// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "ortrain/gpu/gpu_device.h"
#include "ortrain/ops/conv/conv_columns.cuh"
#include "ortrain/testing/harness.h"

namespace ortrain::testing {
namespace {

// All cases of convolutions with columns that fit one image, some of its positions, one channel.
class ConvParts : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { gpu::set_conv_column_bytes(GetParam()); }
  void TearDown() override { gpu::set_conv_column_bytes(int64_t{256} << 20); }
};

TEST_P(ConvParts, EqualReference) {
  for (const OpCase& op_case : all_cases().all()) {
    if (op_case.op.find("Conv") == std::string::npos || op_case.refusal) continue;
    if (op_case.name.find("wide") != std::string::npos) continue;
    for (const CheckRow& row : check_kernels(op_case, gpu::kernels(0))) {
      EXPECT_TRUE(row.passed || row.refused || row.kernel == "host")
          << op_case.op << " " << row.name << " " << row.kernel << " " << name_of(row.type) << ": "
          << row.message;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Bytes, ConvParts, ::testing::Values(8192, 1024, 64));

}  // namespace
}  // namespace ortrain::testing
