// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>

#include "ortrain/base/error.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/runtime/session.h"
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

TEST(MaxPool, AKernelOfPaddingCostsNoTime) {
  constexpr int64_t kHalf = int64_t{1} << 30;
  const Attributes attributes{{"kernel_shape", Ints{2 * kHalf - 1}},
                              {"pads", Ints{kHalf, kHalf - 1}}};
  const CaseInput x = CaseInput::literal(DType::undefined, {1, 1, 2}, {5, 7});
  const auto start = std::chrono::steady_clock::now();
  const std::vector<TensorData> y =
      run({.op = "MaxPool", .name = "wide", .inputs = {x}, .attributes = attributes});
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  EXPECT_LT(seconds.count(), 30.0);
  const float* values = y[0].data_as<float>();
  EXPECT_EQ(std::vector<float>(values, values + 3), (std::vector<float>{7, 7, 7}));
}

TEST(AveragePool, DividesByMorePaddingThanInt64Counts) {
  constexpr int64_t kHalf = int64_t{1} << 30, kKernel = 2 * kHalf - 1, kEnd = kHalf - 2;
  const Attributes attributes{{"kernel_shape", Ints{kKernel, kKernel, kKernel}},
                              {"pads", Ints{kHalf, kHalf, kHalf, kEnd, kEnd, kEnd}},
                              {"count_include_pad", int64_t{1}}};
  const double share = 1e28 / std::pow(static_cast<double>(kKernel), 3);
  const std::vector<TensorData> y =
      run({.op = "AveragePool",
           .name = "wide",
           .inputs = {CaseInput::literal(DType::undefined, {1, 1, 1, 1, 1}, {1e28})},
           .attributes = attributes});
  EXPECT_NEAR(y[0].data_as<float>()[0], share, 1e-5);
  const std::vector<TensorData> dx =
      run({.op = "ortrain::AveragePoolGrad",
           .name = "wide",
           .inputs = {CaseInput::literal(DType::undefined, {1, 1, 1, 1, 1}, {1e28}),
                      CaseInput::int64s({1, 1, 1, 1, 1})},
           .attributes = attributes});
  EXPECT_NEAR(dx[0].data_as<float>()[0], share, 1e-5);
}

TEST(Pool, TablesOfAnAxisAreBounded) {
  Graph graph;
  const ValueId x = graph.add_input({}, "x", DType::f32, {1, 1, Dim::symbol("n")});
  const ValueId y = GraphBuilder(graph).op("MaxPool", {x}, {{"kernel_shape", Ints{1}}});
  graph.add_output({.value = y, .name = "y"});
  EXPECT_THROW(make_execution_plan(graph, {{1, 1, int64_t{1} << 27}}, cpu_kernels(),
                                   {.sizes_only = true, .memory_limit = uint64_t{1} << 40}),
               UnsupportedError);
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
