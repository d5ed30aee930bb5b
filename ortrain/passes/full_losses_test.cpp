// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/full_losses.h"

#include <gtest/gtest.h>

#include <cstring>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/ir/text.h"
#include "ortrain/ir/verifier.h"
#include "ortrain/runtime/session.h"

namespace ortrain {
namespace {

bool apply(Graph& graph) {
  const bool changed = full_losses().run(graph);
  graph.sort();
  graph.remove_dead_nodes();
  verify(graph);
  return changed;
}

// ONNX's numbers: 1 float32, 10 float16, 16 bfloat16.
Graph with_loss(const std::string& body, const std::string& type = "bfloat16",
                const std::string& results = "y") {
  return parse_graph("graph g (" + type + "[n, m, 5] x [user grad], int64[r] labels) => (" +
                     results + ") {\n" + "  const rows = int64[2] {-1, 5}\n" + body + "\n}");
}

const std::string kLoss = R"(
      wide = Cast <to = 1> (x)
      flat = Reshape(wide, rows)
      y = ortrain::CrossEntropy (flat, labels))";

std::string ops_of(const Graph& graph) {
  std::string ops;
  for (NodeId id : graph.order()) ops += graph.node(id).op + " ";
  return ops;
}

struct Made {
  float loss;
  std::vector<uint16_t> gradient;
};

// The loss of [2, 3, 5] logits and its gradient, in their own bits.
Made run(Graph graph) {
  build_backward(graph, {.output_indices = {0}});
  graph.remove_dead_nodes();
  graph.sort();
  auto session = std::make_shared<Session>(graph, cpu_kernels());
  std::vector<uint16_t> x(30);
  for (size_t i = 0; i < x.size(); ++i) {
    const float value = static_cast<float>(i * 7 % 11) * 0.37f - 1.5f;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    x[i] = static_cast<uint16_t>(bits >> 16);
  }
  const std::vector<int64_t> labels{0, 4, -100, 2, 1, 3};
  const float dloss = 0.7f;
  RunContext context(session, session->plan({Dims{2, 3, 5}, Dims{6}, Dims{}}));
  std::vector<const void*> addresses{x.data(), labels.data(), nullptr};
  const auto outputs = context.forward(addresses);
  Made made;
  std::memcpy(&made.loss, outputs[0].block->data(), sizeof made.loss);
  addresses[2] = &dloss;
  const auto gradients = context.backward(addresses);
  made.gradient.resize(30);
  std::memcpy(made.gradient.data(), gradients[1].block->data(), 60);
  return made;
}

TEST(FullLosses, LogitsCastForTheLossAloneAreReadAsTheyAre) {
  const Graph before = with_loss(kLoss);
  Graph after = before;
  EXPECT_TRUE(apply(after));
  EXPECT_EQ(ops_of(after), "Reshape CrossEntropy ");
  EXPECT_EQ(after.value(after.outputs()[0].value).dtype, DType::f32);
  const Made expected = run(before), actual = run(after);
  EXPECT_EQ(expected.loss, actual.loss);
  EXPECT_EQ(expected.gradient, actual.gradient) << "rounded once, by whichever node";
}

TEST(FullLosses, Float16AndShiftedLogitsToo) {
  Graph graph = with_loss(R"(
      wide = Cast <to = 1> (x)
      const first = int64[1] {0}
      const last = int64[1] {-1}
      const axis = int64[1] {1}
      shifted = Slice(wide, first, last, axis)
      flat = Reshape(shifted, rows)
      y, sums = ortrain::CrossEntropy <reduction = "sum"> (flat, labels))",
                          "float16", "y, sums");
  EXPECT_TRUE(apply(graph));
  EXPECT_EQ(ops_of(graph), "Slice Reshape CrossEntropy ");
}

TEST(FullLosses, OtherLossesAreLeftAlone) {
  const auto expect_left_alone = [](Graph graph) {
    graph.remove_dead_nodes();
    const std::string before = print_graph(graph);
    EXPECT_FALSE(apply(graph));
    EXPECT_EQ(print_graph(graph), before);
  };
  // Others read the floats: their gradients are added before they are rounded.
  expect_left_alone(with_loss(kLoss, "bfloat16", "y, wide"));
  expect_left_alone(with_loss(kLoss + "\n z = Exp(flat)", "bfloat16", "y, z"));
  // Nothing was narrow.
  expect_left_alone(with_loss(kLoss, "float64"));
  expect_left_alone(
      with_loss("flat = Reshape(x, rows)\n y = ortrain::CrossEntropy (flat, labels)"));
  // The classes' weights are floats.
  expect_left_alone(with_loss(R"(
      wide = Cast <to = 1> (x)
      flat = Reshape(wide, rows)
      const w = float32[5] {1, 2, 3, 4, 5}
      y = ortrain::CrossEntropy (flat, labels, w))"));
}

}  // namespace
}  // namespace ortrain
