// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/recompute_checkpoints.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/ir/onnx_io.h"
#include "ortrain/ir/text.h"
#include "ortrain/ir/verifier.h"
#include "ortrain/passes/pipeline.h"
#include "ortrain/runtime/session.h"

namespace ortrain {
namespace {

Graph with_backward(const std::string& text) {
  Graph graph = parse_graph(text);
  build_backward(graph, {.output_indices = {0}});
  graph.remove_dead_nodes();
  graph.sort();
  return graph;
}

bool apply(Graph& graph) {
  const bool changed = recompute_checkpoints().run(graph);
  graph.sort();
  graph.remove_dead_nodes();
  verify(graph);
  return changed;
}

int count(const Graph& graph, std::string_view op, Phase phase) {
  int found = 0;
  for (NodeId id : graph.order()) {
    found += graph.node(id).op == op && graph.node(id).phase == phase;
  }
  return found;
}

struct Results {
  std::vector<std::vector<float>> values;
  size_t arena_bytes = 0;
};

// Outputs and gradients for the same inputs; every float input is [8, 64], a seed is 7.
Results run(const Graph& graph) {
  auto session = std::make_shared<Session>(graph, cpu_kernels());
  std::vector<std::vector<float>> tensors;
  std::vector<const void*> forward;
  std::vector<const void*> backward;
  std::vector<Dims> dims;
  static const int64_t seed = 7;
  for (const GraphInput& input : graph.inputs()) {
    if (input.role == InputRole::seed) {
      dims.push_back({});
      forward.push_back(&seed);
      backward.push_back(nullptr);
      continue;
    }
    std::vector<float> values(8 * 64);
    for (size_t j = 0; j < values.size(); ++j) {
      values[j] = static_cast<float>((j * 7 + dims.size() * 3) % 23) * 0.1f - 1.0f;
    }
    tensors.push_back(std::move(values));
    const bool is_gradient = input.role == InputRole::gradient;
    forward.push_back(is_gradient ? nullptr : tensors.back().data());
    backward.push_back(is_gradient ? tensors.back().data() : nullptr);
    dims.push_back({8, 64});
  }
  const auto plan = session->plan(dims);
  RunContext context(session, plan);
  Results results{.arena_bytes = plan->arena_bytes};
  for (auto* outputs : {new auto(context.forward(forward)), new auto(context.backward(backward))}) {
    for (const RunOutput& output : *outputs) {
      if (!output.block) continue;
      const auto* data = static_cast<const float*>(output.block->data());
      results.values.emplace_back(data, data + output.spec.numel());
    }
    delete outputs;
  }
  return results;
}

// Two checkpoints of three layers each.
constexpr char kLayers[] = R"(
graph g (float32[n, 64] x [user grad], float32[n, 64] w [user grad], int64[] s [seed]) => (y) {
  a = Exp(x) ~1
  b = Mul(a, w) ~1
  c = Softmax <axis = 1> (b) ~1
  c2 = ortrain::Dropout <stream = 0, ratio = 0.5> (c, s) ~1
  d = Tanh(c2) ~2
  e = Mul(d, w) ~2
  f = Softmax <axis = 1> (e) ~2
  y = Mul(f, w)
}
)";

TEST(RecomputeCheckpoints, ComputesWhatTheBackwardReadsAgain) {
  Graph graph = with_backward(kLayers);
  const Graph before = graph;
  EXPECT_TRUE(apply(graph));
  EXPECT_EQ(count(graph, "Exp", Phase::backward), 1);
  EXPECT_EQ(count(graph, "Tanh", Phase::backward), 1);
  // The result of the first checkpoint enters the second, and is kept.
  EXPECT_EQ(count(graph, "Dropout", Phase::backward), count(before, "Dropout", Phase::backward));
  EXPECT_EQ(run(graph).values, run(before).values);
}

TEST(RecomputeCheckpoints, TheSecondCheckpointComesBeforeTheFirst) {
  Graph graph = with_backward(kLayers);
  apply(graph);
  size_t exp = 0;
  size_t tanh = 0;
  for (size_t i = 0; i < graph.order().size(); ++i) {
    const Node& node = graph.node(graph.order()[i]);
    if (node.phase == Phase::forward) continue;
    if (node.op == "Exp") exp = i;
    if (node.op == "Tanh") tanh = i;
  }
  EXPECT_LT(tanh, exp);
}

TEST(RecomputeCheckpoints, SavesMemory) {
  std::string text =
      "graph g (float32[n, 64] x [user grad], float32[n, 64] w [user grad]) => (y) {\n"
      "  h0 = Identity(x)\n";
  for (int layer = 1; layer <= 6; ++layer) {
    const std::string l = std::to_string(layer);
    text += "  a" + l + " = Softmax <axis = 1> (h" + std::to_string(layer - 1) + ") ~" + l + "\n";
    text += "  b" + l + " = Softmax <axis = 1> (a" + l + ") ~" + l + "\n";
    text += "  c" + l + " = Softmax <axis = 1> (b" + l + ") ~" + l + "\n";
    text += "  h" + l + " = Mul(c" + l + ", w) ~" + l + "\n";
  }
  text += "  y = Mul(h6, w)\n}\n";
  Graph graph = with_backward(text);
  const Graph before = graph;
  apply(graph);
  const Results kept = run(before);
  const Results again = run(graph);
  EXPECT_EQ(again.values, kept.values);
  EXPECT_LT(again.arena_bytes, kept.arena_bytes * 6 / 10);
}

TEST(RecomputeCheckpoints, LeavesGraphsWithoutCheckpointsAlone) {
  std::string text = kLayers;
  for (size_t at = text.find('~'); at != std::string::npos; at = text.find('~')) text.erase(at, 2);
  Graph graph = with_backward(text);
  EXPECT_FALSE(apply(graph));
}

TEST(RecomputeCheckpoints, LeavesAForwardAlone) {
  Graph graph = parse_graph(kLayers);
  EXPECT_FALSE(apply(graph));
}

TEST(RecomputeCheckpoints, ResultsOfTheGraphAreKept) {
  Graph graph = with_backward(
      "graph g (float32[n, 64] x [user grad]) => (y, a) {\n  a = Exp(x) ~1\n  y = Tanh(a) ~1\n}\n");
  EXPECT_FALSE(apply(graph));
}

TEST(RecomputeCheckpoints, FilesAndTextKeepTheCheckpoints) {
  const Graph graph = parse_graph(kLayers);
  EXPECT_EQ(print_graph(parse_graph(print_graph(graph))), print_graph(graph));
  const std::string bytes = to_onnx_bytes(graph);
  EXPECT_EQ(print_graph(load_onnx_bytes(std::as_bytes(std::span(bytes)))), print_graph(graph));
  for (const char* wrong : {"~0", "~-1", "~x", "~99999999999"}) {
    EXPECT_THROW(parse_graph(std::string("graph g (float32[2] x) => (y) {\n  y = Exp(x) ") + wrong +
                             "\n}\n"),
                 InvalidModelError)
        << wrong;
  }
}

}  // namespace
}  // namespace ortrain
