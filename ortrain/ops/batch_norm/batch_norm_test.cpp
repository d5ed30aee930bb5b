// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "ortrain/testing/harness.h"

namespace ortrain {
namespace {

using testing::CaseInput;
using testing::OpCase;

TEST(BatchNormTraining, KeepsDigitsFarFromZero) {
  // The variance of 10000 and 10001 is 0.25; E[x^2] - E[x]^2 in float32 would lose it.
  const OpCase op_case{
      .op = "ortrain::BatchNormTraining",
      .name = "far",
      .inputs = {CaseInput::literal(DType::undefined, {4, 1}, {10000, 10001, 10001, 10000})},
      .attributes = {{"epsilon", 0.0}}};
  const std::vector<TensorData> y =
      testing::run_kernel(op_case, testing::make_inputs(op_case, DType::f32), "", cpu_kernels());
  const float* values = y[0].data_as<float>();
  EXPECT_EQ(std::vector<float>(values, values + 4), (std::vector<float>{-1, 1, 1, -1}));
}

TEST(BatchNormTraining, EmptyBatchLeavesTheRunningStatistics) {
  const OpCase op_case{
      .op = "ortrain::BatchNormTraining",
      .name = "empty",
      .inputs = {CaseInput::normal({0, 2, 3}), CaseInput::none(), CaseInput::none(),
                 CaseInput::literal(DType::undefined, {2}, {3, 4}),
                 CaseInput::literal(DType::undefined, {2}, {5, 6})},
      .outputs = 3};
  const std::vector<TensorData> out =
      testing::run_kernel(op_case, testing::make_inputs(op_case, DType::f32), "", cpu_kernels());
  EXPECT_EQ(out[1].data_as<float>()[0], 3);
  EXPECT_EQ(out[2].data_as<float>()[1], 6);
}

}  // namespace
}  // namespace ortrain
