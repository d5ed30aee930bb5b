// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/causal_masks.h"

#include <gtest/gtest.h>

#include <cstring>

#include "ortrain/ir/text.h"
#include "ortrain/ir/verifier.h"
#include "ortrain/runtime/session.h"

namespace ortrain {
namespace {

bool apply(Graph& graph) {
  const bool changed = causal_masks().run(graph);
  graph.sort();
  graph.remove_dead_nodes();
  verify(graph);
  return changed;
}

// Attention of two heads of 4 columns over `mask`, which `body` makes of "shape" = Shape(q), the
// rows "n" as a scalar and "ids", int64 [b, n], and "seen", bool [b, n].
Graph attention(const std::string& body, const std::string& keys = "n") {
  const std::string text = std::string(R"(
    graph g (float32[b, n, 8] q, float32[b, )") +
                           keys + R"(, 8] k, int64[b, n] ids, bool[b, n] seen) => (y) {
      const zero = int64[] {0}
      const one = int64[] {1}
      const first = int64[1] {0}
      const second = int64[1] {1}
      const last = int64[1] {-1}
      shape = Shape(q)
      n_of = Gather <axis = 0> (shape, one)
      b_of = Gather <axis = 0> (shape, zero)
      positions = Range(zero, n_of, one)
      row = Unsqueeze(positions, first)
      column = Unsqueeze(positions, second)
)" + body + R"(
      y = ortrain::Attention <q_num_heads = 2, kv_num_heads = 2, scale = 0.5> (q, k, k, mask)
    })";
  return parse_graph(text);
}

const Node& node_of(const Graph& graph) {
  for (NodeId id : graph.order()) {
    if (graph.node(id).op == "Attention") return graph.node(id);
  }
  throw std::logic_error("no attention");
}

bool is_causal(const Graph& graph) {
  const auto found = node_of(graph).attributes.find("is_causal");
  return found != node_of(graph).attributes.end() && std::get<int64_t>(found->second) != 0;
}

bool has_mask(const Graph& graph) {
  const Node& node = node_of(graph);
  return node.inputs.size() > 3 && node.inputs[3] != kNoValue;
}

std::vector<float> run(const Graph& graph, int64_t batch, int64_t rows, int64_t keys) {
  auto session = std::make_shared<Session>(graph, cpu_kernels());
  std::vector<float> q(static_cast<size_t>(batch * rows * 8)),
      k(static_cast<size_t>(batch * keys * 8));
  for (size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>((i * 37) % 19) * 0.1f - 0.9f;
  for (size_t i = 0; i < k.size(); ++i) k[i] = static_cast<float>((i * 53) % 23) * 0.1f - 1.1f;
  std::vector<int64_t> ids(static_cast<size_t>(batch * rows));
  std::vector<uint8_t> seen(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<int64_t>(i % static_cast<size_t>(rows)) % 3;
    seen[i] = i % 5 != 3;
  }
  RunContext context(session, session->plan({Dims{batch, rows, 8}, Dims{batch, keys, 8},
                                             Dims{batch, rows}, Dims{batch, rows}}));
  const std::vector<const void*> addresses{q.data(), k.data(), ids.data(), seen.data()};
  const auto outputs = context.forward(addresses);
  std::vector<float> result(outputs[0].spec.bytes() / sizeof(float));
  std::memcpy(result.data(), outputs[0].block->data(), outputs[0].spec.bytes());
  return result;
}

void expect_same_results(const Graph& before, const Graph& after) {
  for (const int64_t rows : {1, 2, 7, 33}) {
    const auto expected = run(before, 2, rows, rows), actual = run(after, 2, rows, rows);
    ASSERT_EQ(expected.size(), actual.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(expected[i], actual[i], 1e-6f) << rows << " rows, element " << i;
    }
  }
}

void expect_causal(const std::string& body, bool keeps_mask) {
  const Graph before = attention(body);
  Graph after = before;
  EXPECT_TRUE(apply(after));
  EXPECT_TRUE(is_causal(after));
  EXPECT_EQ(has_mask(after), keeps_mask);
  expect_same_results(before, after);
}

void expect_left_alone(const std::string& body, const std::string& keys = "n") {
  Graph graph = attention(body, keys);
  graph.remove_dead_nodes();
  const std::string before = print_graph(graph);
  EXPECT_FALSE(apply(graph));
  EXPECT_EQ(print_graph(graph), before);
}

TEST(CausalMasks, AComparisonOfPositionsIsCausal) {
  expect_causal("mask = LessOrEqual(row, column)", false);
  expect_causal("mask = GreaterOrEqual(column, row)", false);
  expect_causal("above = Greater(row, column)\n mask = Not(above)", false);
  expect_causal("next = Add(column, one)\n mask = Less(row, next)", false);
}

TEST(CausalMasks, WhatElseAMaskSaysRemains) {
  const std::string padding = R"(
      le = LessOrEqual(row, column)
      const axes = int64[2] {1, 2}
      pad = Unsqueeze(seen, axes)
      mask = And(le, pad))";
  expect_causal(padding, true);
  Graph graph = attention(padding);
  apply(graph);
  EXPECT_EQ(graph.value(node_of(graph).inputs[3]).shape.size(), 4u);
  EXPECT_TRUE(graph.value(node_of(graph).inputs[3]).shape[2].is(1)) << "a row for all queries";
  // A window of positions.
  expect_causal(R"(
      le = LessOrEqual(row, column)
      const width = int64[] {3}
      from = Sub(column, width)
      near = Greater(row, from)
      mask = And(near, le))",
                true);
}

// Hugging Face's masks: positions that come one after the other are of one sequence.
constexpr const char* kPacked = R"(
      extents = Concat <axis = 0> (b_1, n_1)
      wide = Expand(row, extents)
      before = Slice(wide, first, second, second, second)
      ahead = Sub(before, one)
      joined = Concat <axis = 1> (ahead, wide)
      const far = int64[1] {9223372036854775807}
      right = Slice(joined, second, far, second, second)
      left = Slice(joined, first, last, second, second)
      step = Sub(right, left)
      follows = Equal(step, one)
      breaks = Not(follows)
      numbers = Cast <to = 7> (breaks)
      sequence = CumSum(numbers, one)
      batches = Range(zero, b_of, one)
      const of_batch = int64[3] {1, 2, 3}
      batch = Unsqueeze(batches, of_batch)
      const of_row = int64[3] {0, 1, 3}
      const of_column = int64[3] {0, 1, 2}
      query = Unsqueeze(positions, of_row)
      key = Unsqueeze(positions, of_column)
      grid_q = Concat <axis = 0> (b_1, second, n_1, second)
      grid_k = Concat <axis = 0> (b_1, second, second, n_1)
      const end = int64[1] {4}
      bq = Expand(batch, grid_q)
      bq_1 = Unsqueeze(bq, end)
      iq = Expand(query, grid_q)
      iq_1 = Unsqueeze(iq, end)
      at_q = Concat <axis = 4> (bq_1, iq_1)
      bk = Expand(batch, grid_k)
      bk_1 = Unsqueeze(bk, end)
      ik = Expand(key, grid_k)
      ik_1 = Unsqueeze(ik, end)
      at_k = Concat <axis = -1> (bk_1, ik_1)
      of_q = GatherND(sequence, at_q)
      of_k = GatherND(sequence, at_k)
      pos_q = GatherND(wide, at_q)
      pos_k = GatherND(wide, at_k)
      le = LessOrEqual(pos_k, pos_q)
      const yes = bool[] {1}
      both = And(yes, le)
      one_sequence = Equal(of_q, of_k)
      mask = And(both, one_sequence))";

std::string packed(const std::string& positions) {
  std::string body = "      b_1 = Unsqueeze(b_of, first)\n      n_1 = Unsqueeze(n_of, first)\n";
  body += kPacked;
  const std::string wide = "wide = Expand(row, extents)";
  body.replace(body.find(wide), wide.size(), positions);
  return body;
}

TEST(CausalMasks, PositionsThatCountAreOneSequence) {
  expect_causal(packed("wide = Expand(row, extents)"), false);
  expect_causal(packed("shifted = Add(row, one)\n wide = Expand(shifted, extents)"), false);
}

TEST(CausalMasks, PositionsOfTheCallersAreNotKnown) {
  expect_left_alone(packed("wide = Identity(ids)"));
}

TEST(CausalMasks, OtherMasksAreLeftAlone) {
  expect_left_alone("mask = LessOrEqual(column, row)");
  expect_left_alone("mask = Less(row, column)");
  expect_left_alone("next = Add(column, one)\n mask = LessOrEqual(row, next)");
  expect_left_alone(
      "const two = int64[] {2}\n far = Mul(column, two)\n mask = LessOrEqual(row, far)");
  expect_left_alone(
      "le = LessOrEqual(row, column)\n other = Less(row, column)\n mask = Or(le, other)");
  // The keys are others than those whose positions are compared.
  expect_left_alone("mask = LessOrEqual(row, column)", "m");
}

// Hugging Face's masks of encoders: positions that are none below 0, and padding.
TEST(CausalMasks, OfAMaskThatIsOfKeysTheKeysRemain) {
  for (const char* body : {"from = GreaterOrEqual(column, zero)\n const axes = int64[2] {1, 2}\n"
                           "pad = Unsqueeze(seen, axes)\n mask = And(from, pad)",
                           "from = LessOrEqual(zero, column)\n const axes = int64[2] {1, 2}\n"
                           "pad = Unsqueeze(seen, axes)\n const yes = bool[] {1}\n"
                           "all = And(yes, from)\n mask = And(pad, all)"}) {
    Graph graph = attention(body);
    graph.remove_dead_nodes();
    const Graph before = graph;
    EXPECT_FALSE(graph.value(node_of(graph).inputs[3]).shape[2].is(1));
    EXPECT_TRUE(apply(graph)) << body;
    ASSERT_TRUE(has_mask(graph));
    EXPECT_TRUE(graph.value(node_of(graph).inputs[3]).shape[2].is(1)) << "a row for all queries";
    EXPECT_FALSE(is_causal(graph));
    expect_same_results(before, graph);
    EXPECT_FALSE(apply(graph)) << "nothing is left to do";
  }
  // Two parts are no smaller than what they make together.
  expect_left_alone(
      "const axes = int64[2] {1, 2}\n pad = Unsqueeze(seen, axes)\n"
      "const of_row = int64[2] {1, 3}\n other = Unsqueeze(seen, of_row)\n mask = And(pad, other)");
}

TEST(CausalMasks, AMaskThatHidesNothingGoes) {
  Graph graph = attention("mask = GreaterOrEqual(positions, zero)");
  const Graph before = graph;
  EXPECT_TRUE(apply(graph));
  EXPECT_FALSE(has_mask(graph));
  EXPECT_FALSE(is_causal(graph));
  expect_same_results(before, graph);
}

}  // namespace
}  // namespace ortrain
