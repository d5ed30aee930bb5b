// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/cpu/onednn.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/ops/conv/conv_kernels.h"
#include "ortrain/testing/harness.h"

namespace ortrain {
namespace {

using Ints = std::vector<int64_t>;

struct ConvGraph {
  Graph graph;
  ValueId x, w, y;

  ConvGraph(const char* op, Shape x_shape, Dims w_dims, Attributes attributes, bool train_x = true,
            bool train_w = true) {
    x = graph.add_input({.role = InputRole::user, .requires_grad = train_x}, "x", DType::f32,
                        std::move(x_shape));
    w = graph.add_input({.role = InputRole::parameter, .target = "w", .requires_grad = train_w},
                        "w", DType::f32, to_shape(w_dims));
    y = GraphBuilder(graph).op(op, {x, w}, std::move(attributes));
    graph.add_output({.value = y, .name = "y"});
  }
  std::string shape() const { return shape_str(graph.value(y).shape); }
  int count(const std::string& op) const {
    return static_cast<int>(std::count_if(graph.order().begin(), graph.order().end(),
                                          [&](NodeId id) { return graph.node(id).op == op; }));
  }
};

const Dim kBatch = Dim::symbol("n"), kHeight = Dim::symbol("h"), kWidth = Dim::symbol("w");

TEST(Conv, KeepsSymbolsInShapes) {
  const Shape x{kBatch, 3, kHeight, kWidth};
  EXPECT_EQ(ConvGraph("Conv", x, {8, 3, 3, 3}, {{"pads", Ints{1, 1, 1, 1}}}).shape(),
            "[n, 8, h, w]");
  EXPECT_EQ(ConvGraph("Conv", x, {8, 3, 3, 5}, {}).shape(), "[n, 8, h - 2, w - 4]");
  EXPECT_EQ(ConvGraph("ConvTranspose", x, {3, 8, 2, 2}, {{"strides", Ints{2, 2}}}).shape(),
            "[n, 8, 2*h, 2*w]");
}

TEST(Conv, AWeightWithoutElementsCostsNoTime) {
  constexpr int64_t kHalf = int64_t{1} << 29;
  const testing::OpCase op_case{.op = "ortrain::ConvInputGrad",
                                .name = "empty_weight",
                                .inputs = {testing::CaseInput::normal({1, 0, 6}),
                                           testing::CaseInput::normal({0, 1, 2 * kHalf - 1}),
                                           testing::CaseInput::int64s({1, 1, 4})},
                                .attributes = {{"pads", Ints{kHalf, kHalf}}}};
  const auto start = std::chrono::steady_clock::now();
  const std::vector<TensorData> dx =
      testing::run_kernel(op_case, testing::make_inputs(op_case, DType::f32), "", cpu_kernels());
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  EXPECT_LT(seconds.count(), 30.0);
  const float* values = dx[0].data_as<float>();
  EXPECT_EQ(std::vector<float>(values, values + 4), std::vector<float>(4, 0.0f));
}

TEST(Conv, DifferentiatesSymbolicShapes) {
  for (const char* op : {"Conv", "ConvTranspose"}) {
    ConvGraph g(op, {kBatch, 4, kHeight, kWidth}, {4, 4, 3, 3},
                {{"strides", Ints{2, 2}}, {"pads", Ints{1, 1, 1, 1}}});
    build_backward(g.graph, {.output_indices = {0}});
    int gradients = 0;
    for (const GraphOutput& output : g.graph.outputs()) {
      if (output.role != OutputRole::gradient) continue;
      ++gradients;
      const Shape expected =
          output.target == "x" ? Shape{kBatch, 4, kHeight, kWidth} : Shape{4, 4, 3, 3};
      EXPECT_EQ(shape_str(g.graph.value(output.value).shape), shape_str(expected)) << op;
    }
    EXPECT_EQ(gradients, 2);
  }
}

TEST(Conv, BuildsNoGradientForFrozenInputs) {
  ConvGraph frozen_weight("Conv", {2, 3, 8, 8}, {4, 3, 3, 3}, {}, true, false);
  build_backward(frozen_weight.graph, {.output_indices = {0}});
  EXPECT_EQ(frozen_weight.count("ConvInputGrad"), 1);
  EXPECT_EQ(frozen_weight.count("ConvWeightGrad"), 0);
  ConvGraph first_layer("Conv", {2, 3, 8, 8}, {4, 3, 3, 3}, {}, false, true);
  build_backward(first_layer.graph, {.output_indices = {0}});
  EXPECT_EQ(first_layer.count("ConvInputGrad"), 0);
  EXPECT_EQ(first_layer.count("ConvWeightGrad"), 1);
}

TEST(ConvTranspose, RefusesGradientOfOutputShapeWithSymbols) {
  ConvGraph g("ConvTranspose", {kBatch, 2, kHeight, 4}, {2, 3, 3, 3},
              {{"output_shape", Ints{9, 9}}, {"strides", Ints{2, 2}}});
  EXPECT_EQ(g.shape(), "[n, 3, 9, 9]");
  EXPECT_THROW(build_backward(g.graph, {.output_indices = {0}}), UnsupportedError);
}

TEST(Conv, LibraryGetsNoImageOf2GiB) {
  const auto refusal = [](int64_t width, int64_t channels, int64_t kernel) {
    cpu::ConvNode node{.direction = cpu::Direction::kForward};
    ops::ConvProblem& p = node.problem;
    p.batch = 1;
    p.in_channels = p.out_channels = channels;
    p.spatial_rank = 1;
    p.axes.resize(3);
    p.axes[2] = {.in = width, .out = width - kernel + 1, .kernel = kernel};
    return cpu::conv_onednn_refuses(node).value_or("");
  };
  constexpr int64_t kFloats = int64_t{1} << 29;
  for (const std::string& why :
       {refusal(kFloats, 1, 3), refusal(kFloats / 4, 4, 3), refusal(kFloats, 1, kFloats),
        refusal((int64_t{1} << 32) + 9, 1, 3), refusal(64, 1 << 14, 3)}) {
    EXPECT_NE(why.find("2^31 bytes"), std::string::npos) << why;
  }
  EXPECT_EQ(refusal(64, 4, 3).find("2^31 bytes"), std::string::npos);
}

TEST(Conv, LibraryTellsWhatItKeeps) {
  if (cpu::onednn() == nullptr) GTEST_SKIP() << cpu::onednn_missing_reason();
  const ConvGraph g("Conv", {2, 4, 9, 9}, {8, 4, 3, 3}, {});
  const auto plan = make_execution_plan(g.graph, {{2, 4, 9, 9}, {8, 4, 3, 3}}, cpu_kernels());
  ASSERT_EQ(plan->steps.size(), 1U);
  ASSERT_EQ(plan->steps[0].kernel, "onednn");
  EXPECT_GT(plan->steps[0].kept_bytes, 10'000U);
  EXPECT_GT(plan->held_bytes(), plan->steps[0].kept_bytes);
}

TEST(Conv, LibraryTakesOrdinaryShapes) {
  if (cpu::onednn() == nullptr) GTEST_SKIP() << cpu::onednn_missing_reason();
  const testing::OpCase op_case{.op = "Conv",
                                .name = "ordinary",
                                .inputs = {testing::CaseInput::normal({2, 3, 9, 9}),
                                           testing::CaseInput::normal({4, 3, 3, 3})},
                                .attributes = {{"pads", Ints{1, 1, 1, 1}}}};
  EXPECT_NO_THROW(testing::run_kernel(op_case, testing::make_inputs(op_case, DType::f32), "onednn",
                                      cpu_kernels()));
}

}  // namespace
}  // namespace ortrain
