// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/choose_recomputation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/ir/text.h"
#include "ortrain/ir/verifier.h"
#include "ortrain/passes/recomputation.h"

namespace ortrain {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Graph with_backward(const std::string& text) {
  Graph graph = parse_graph(text);
  build_backward(graph, {.output_indices = {0}});
  graph.remove_dead_nodes();
  graph.sort();
  return graph;
}

// Exp and Tanh keep their results for the backward.
constexpr char kChain[] = R"(
graph g (float32[n, 64] x [user grad], float32[n, 64] w [user grad]) => (y) {
  a = Exp(x)
  b = Tanh(a)
  c = Softmax <axis = 1> (b)
  y = Mul(c, w)
}
)";

// Every node of the forward takes `time` and every value made there 100 bytes, results none.
RecomputeCosts costs_of(const Graph& graph, double time) {
  RecomputeCosts costs{.time = std::vector<double>(graph.num_node_slots(), time),
                       .bytes = std::vector<double>(graph.num_values(), 0)};
  for (NodeId id : graph.order()) {
    if (graph.node(id).phase != Phase::forward) continue;
    for (ValueId output : graph.node(id).outputs) costs.bytes[static_cast<size_t>(output)] = 100;
  }
  for (const GraphOutput& output : graph.outputs()) {
    costs.bytes[static_cast<size_t>(output.value)] = 0;
  }
  return costs;
}

std::vector<double> prices(const Graph& graph, double price) {
  return std::vector<double>(graph.num_values(), price);
}

std::vector<std::string> not_kept(const Graph& graph, const std::vector<bool>& is_kept) {
  std::vector<std::string> names;
  for (size_t v = 0; v < is_kept.size(); ++v) {
    if (!is_kept[v]) names.push_back(graph.value(static_cast<ValueId>(v)).name);
  }
  return names;
}

size_t index_of(const Graph& graph, const char* name) {
  return static_cast<size_t>(graph.find_value(name));
}

TEST(ChooseRecomputation, ComputesAgainWhatIsCheaperThanItsBytes) {
  const Graph graph = with_backward(kChain);
  const RecomputeCosts costs = costs_of(graph, 50);
  EXPECT_THAT(not_kept(graph, choose_kept_values(graph, costs, prices(graph, 0.4))), IsEmpty());
  EXPECT_THAT(not_kept(graph, choose_kept_values(graph, costs, prices(graph, 1))),
              ElementsAre("a", "b", "c"));
}

TEST(ChooseRecomputation, KeepsWhatIsDearToMake) {
  const Graph graph = with_backward(kChain);
  RecomputeCosts costs = costs_of(graph, 1);
  costs.time[static_cast<size_t>(graph.value(graph.find_value("a")).producer)] = 1000;
  EXPECT_THAT(not_kept(graph, choose_kept_values(graph, costs, prices(graph, 1))),
              ElementsAre("b", "c"));
}

TEST(ChooseRecomputation, APriceOfZeroKeepsAValue) {
  const Graph graph = with_backward(kChain);
  std::vector<double> price = prices(graph, 100);
  price[index_of(graph, "b")] = 0;
  EXPECT_THAT(not_kept(graph, choose_kept_values(graph, costs_of(graph, 1), price)),
              ElementsAre("a", "c"));
}

TEST(ChooseRecomputation, ResultsAndInputsAreThereAnyway) {
  const Graph graph = with_backward(
      "graph g (float32[n, 64] x [user grad]) => (y, a) {\n  a = Exp(x)\n  y = Tanh(a)\n}\n");
  EXPECT_THAT(not_kept(graph, choose_kept_values(graph, costs_of(graph, 1), prices(graph, 100))),
              IsEmpty());
}

TEST(ChooseRecomputation, LeavesAForwardAlone) {
  const Graph graph = parse_graph(kChain);
  EXPECT_THAT(not_kept(graph, choose_kept_values(graph, costs_of(graph, 1), prices(graph, 100))),
              IsEmpty());
}

TEST(ChooseRecomputation, WhatRunsOutsideRunsOnce) {
  EXPECT_FALSE(can_run_again({.op = "External", .domain = std::string(kOrtrainDomain)}));
  EXPECT_TRUE(can_run_again({.op = "Dropout", .domain = std::string(kOrtrainDomain)}));
  EXPECT_TRUE(can_run_again({.op = "MatMul"}));
}

TEST(ChooseRecomputation, CopiesStandInTheBackwardOnce) {
  Graph graph = with_backward(kChain);
  const std::vector<bool> kept = choose_kept_values(graph, costs_of(graph, 1), prices(graph, 100));
  EXPECT_EQ(recompute_in_backward(graph, kept).size(), 3u);
  graph.sort();
  graph.remove_dead_nodes();
  verify(graph);
  int again = 0;
  for (NodeId id : graph.order()) {
    const Node& node = graph.node(id);
    again += node.phase == Phase::backward && node.op == "Exp";
    if (node.phase == Phase::forward) continue;
    for (ValueId input : node.inputs) {
      EXPECT_THAT(graph.value(input).name, ::testing::Not(::testing::AnyOf("a", "b", "c")));
    }
  }
  EXPECT_EQ(again, 1);
}

TEST(ChooseRecomputation, PartsMeetWhereFewBytesAreAlive) {
  std::string text = "graph g (float32[n, 64] x [user grad]) => (y) {\n  h0 = Exp(x)\n";
  for (int layer = 1; layer <= 4; ++layer) {
    const std::string l = std::to_string(layer);
    const std::string before = "h" + std::to_string(layer - 1);
    text += "  a" + l + " = Exp(" + before + ")\n  b" + l + " = Tanh(" + before + ")\n";
    text += "  h" + l + " = Mul(a" + l + ", b" + l + ")\n";
  }
  const Graph graph = with_backward(text + "  y = Tanh(h4)\n}\n");
  const RecomputeCosts costs = costs_of(graph, 1);
  const std::vector<bool> between = values_between_parts(graph, costs, 4);
  std::vector<std::string> names;
  for (size_t v = 0; v < between.size(); ++v) {
    if (between[v]) names.push_back(graph.value(static_cast<ValueId>(v)).name);
  }
  EXPECT_THAT(names, ElementsAre("h1", "h2", "h3"));
  EXPECT_EQ(values_between_parts(graph, costs, 1), std::vector<bool>(graph.num_values(), false));
}

}  // namespace
}  // namespace ortrain
