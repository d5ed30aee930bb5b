// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "ortrain/base/error.h"
#include "ortrain/testing/harness.h"

namespace ortrain::testing {
namespace {

std::vector<float> counts_of(const std::vector<double>& x, int64_t bins, double low, double high) {
  const OpCase op_case{
      .op = "ortrain::BinCount",
      .name = "counts",
      .inputs = {CaseInput::literal(DType::undefined, {static_cast<int64_t>(x.size())}, x)},
      .attributes = {{"bins", bins}, {"min", low}, {"max", high}}};
  const TensorData counts =
      run_kernel(op_case, make_inputs(op_case, DType::f32), "", cpu_kernels())[0];
  return std::vector<float>(counts.data_as<float>(), counts.data_as<float>() + bins);
}

TEST(BinCount, OfRangesAtTheEndsOfTheFloats) {
  EXPECT_THROW(counts_of({-3e38, 3e38}, 4, 0, 0), IndexError);
  // The number of bins times the distance is no float.
  EXPECT_EQ(counts_of({-1e38, 0, 1e38}, 100, -1e38, 1e38)[99], 1);
  EXPECT_EQ(counts_of({-1e38, 0, 1e38}, 100, -1e38, 1e38)[50], 1);
  // 1 on both sides changes neither bound.
  EXPECT_EQ(counts_of({1e20, 1e20}, 3, 0, 0), (std::vector<float>{2, 0, 0}));
}

}  // namespace
}  // namespace ortrain::testing
