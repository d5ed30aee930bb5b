// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Which data-moving nodes cost nothing because they only look at their input differently.
#include <gtest/gtest.h>

#include "ortrain/testing/harness.h"

namespace ortrain::testing {
namespace {

using In = CaseInput;

bool is_view(const OpCase& op_case) {
  const std::vector<TensorData> inputs = make_inputs(op_case, DType::f32);
  try {
    run_kernel(op_case, inputs, "view", cpu_kernels());
    return true;
  } catch (const UnsupportedError&) {
    return false;
  }
}

bool slice_is_view(Dims dims, int64_t axis, int64_t start, int64_t end, int64_t step = 1) {
  return is_view({.op = "Slice",
                  .name = "view",
                  .inputs = {In::normal(std::move(dims)), In::int64s({start}), In::int64s({end}),
                             In::int64s({axis}), In::int64s({step})}});
}

TEST(Views, ContiguousAlignedSlices) {
  EXPECT_TRUE(slice_is_view({8, 16}, 0, 2, 6));
  EXPECT_TRUE(slice_is_view({1, 8, 16}, 1, 3, 4));
  EXPECT_TRUE(slice_is_view({8, 3}, 0, 0, 5));
  EXPECT_FALSE(slice_is_view({8, 3}, 0, 1, 5)) << "the result would not be aligned";
  EXPECT_FALSE(slice_is_view({8, 16}, 1, 0, 8)) << "the result lies in pieces";
  EXPECT_FALSE(slice_is_view({8, 16}, 0, 0, 8, 2));
  EXPECT_FALSE(slice_is_view({8, 16}, 0, 7, -9, -1));
}

TEST(Views, SplitAlongTheLeadingAxis) {
  const auto split = [](Dims dims, int64_t axis, std::vector<int64_t> sizes) {
    return is_view({.op = "Split",
                    .name = "view",
                    .inputs = {In::normal(std::move(dims)), In::int64s(sizes)},
                    .attributes = {{"axis", axis}},
                    .outputs = sizes.size()});
  };
  EXPECT_TRUE(split({8, 16}, 0, {3, 5}));
  EXPECT_TRUE(split({1, 8, 16}, 1, {3, 5}));
  EXPECT_FALSE(split({8, 16}, 1, {8, 8}));
  EXPECT_FALSE(split({8, 3}, 0, {3, 5}));
}

TEST(Views, TransposeThatMovesOnesOnly) {
  const auto transpose = [](Dims dims, std::vector<int64_t> perm) {
    return is_view({.op = "Transpose",
                    .name = "view",
                    .inputs = {In::normal(std::move(dims))},
                    .attributes = {{"perm", perm}}});
  };
  EXPECT_TRUE(transpose({4, 5}, {0, 1}));
  EXPECT_TRUE(transpose({1, 4, 1, 5}, {1, 0, 3, 2}));
  EXPECT_FALSE(transpose({4, 5}, {1, 0}));
}

TEST(Views, NothingRepeatedOrSummed) {
  const auto with_shape = [](const char* op, Dims dims, std::vector<int64_t> shape) {
    return is_view({.op = op,
                    .name = "view",
                    .inputs = {In::normal(std::move(dims)), In::int64s(std::move(shape))}});
  };
  EXPECT_TRUE(with_shape("Expand", {2, 3}, {1, 2, 3}));
  EXPECT_FALSE(with_shape("Expand", {2, 1}, {2, 3}));
  EXPECT_TRUE(with_shape("ortrain::SumToShape", {1, 2, 3}, {2, 3}));
  EXPECT_FALSE(with_shape("ortrain::SumToShape", {4, 3}, {3}));
  EXPECT_TRUE(with_shape("Reshape", {2, 3}, {3, 2}));
}

}  // namespace
}  // namespace ortrain::testing
