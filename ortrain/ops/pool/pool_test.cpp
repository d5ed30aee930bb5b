// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ortrain/ir/graph_builder.h"
#include "ortrain/testing/harness.h"

namespace ortrain {
namespace {

using Ints = std::vector<int64_t>;
using testing::CaseInput;
using testing::OpCase;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<TensorData> run(const OpCase& op_case) {
  return testing::run_kernel(op_case, testing::make_inputs(op_case, DType::f32), "", cpu_kernels());
}

TEST(MaxPool, NanWinsForwardAndBackward) {
  const Attributes attributes{{"kernel_shape", Ints{2}}, {"strides", Ints{2}}};
  const CaseInput x = CaseInput::literal(DType::undefined, {1, 1, 4}, {kNan, 5, 1, 2});
  const std::vector<TensorData> y =
      run({.op = "MaxPool", .name = "nan", .inputs = {x}, .attributes = attributes, .outputs = 2});
  EXPECT_TRUE(std::isnan(y[0].data_as<float>()[0]));
  EXPECT_EQ(y[0].data_as<float>()[1], 2);
  EXPECT_EQ(y[1].data_as<int64_t>()[0], 0);
  EXPECT_EQ(y[1].data_as<int64_t>()[1], 3);
  const std::vector<TensorData> dx =
      run({.op = "ortrain::MaxPoolGrad",
           .name = "nan",
           .inputs = {CaseInput::literal(DType::undefined, {1, 1, 2}, {3, 4}), x},
           .attributes = attributes});
  const float* d = dx[0].data_as<float>();
  EXPECT_EQ(std::vector<float>(d, d + 4), (std::vector<float>{3, 0, 0, 4}));
}

TEST(MaxPool, WindowWithoutElements) {
  // Both elements of the dilated window lie in the padding.
  const Attributes attributes{
      {"kernel_shape", Ints{2}}, {"dilations", Ints{2}}, {"pads", Ints{1, 1}}};
  const CaseInput x = CaseInput::literal(DType::undefined, {1, 1, 1}, {7});
  const std::vector<TensorData> y = run(
      {.op = "MaxPool", .name = "empty", .inputs = {x}, .attributes = attributes, .outputs = 2});
  EXPECT_EQ(y[0].data_as<float>()[0], -std::numeric_limits<float>::infinity());
  EXPECT_EQ(y[1].data_as<int64_t>()[0], -1);
  const std::vector<TensorData> dx =
      run({.op = "ortrain::MaxPoolGrad",
           .name = "empty",
           .inputs = {CaseInput::literal(DType::undefined, {1, 1, 1}, {3}), x},
           .attributes = attributes});
  EXPECT_EQ(dx[0].data_as<float>()[0], 0);
  const std::vector<TensorData> average =
      run({.op = "AveragePool", .name = "empty", .inputs = {x}, .attributes = attributes});
  EXPECT_EQ(average[0].data_as<float>()[0], 0);
}

TEST(Pool, KeepsSymbolsInShapes) {
  Graph graph;
  const Dim n = Dim::symbol("n"), h = Dim::symbol("h");
  const ValueId x = graph.add_input({}, "x", DType::f32, {n, 3, h, 8});
  const ValueId y = GraphBuilder(graph).op(
      "MaxPool", {x},
      {{"kernel_shape", Ints{3, 3}}, {"pads", Ints{1, 1, 1, 1}}, {"strides", Ints{1, 2}}});
  EXPECT_EQ(shape_str(graph.value(y).shape), "[n, 3, h, 4]");
}

}  // namespace
}  // namespace ortrain
