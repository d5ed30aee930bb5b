// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/move_casts.h"

#include <gtest/gtest.h>

#include "ortrain/ir/text.h"
#include "ortrain/ir/verifier.h"
#include "ortrain/runtime/session.h"

namespace ortrain {
namespace {

bool apply(Graph& graph) {
  const bool changed = move_casts().run(graph);
  graph.sort();
  graph.remove_dead_nodes();
  verify(graph);
  return changed;
}

std::vector<std::string> ops_of(const Graph& graph) {
  std::vector<std::string> ops;
  for (NodeId id : graph.order()) ops.push_back(graph.node(id).op);
  return ops;
}

DType input_type(const Graph& graph, std::string_view op) {
  for (NodeId id : graph.order()) {
    if (graph.node(id).op == op) return graph.value(graph.node(id).inputs[0]).dtype;
  }
  return DType::undefined;
}

// The bytes of the first output for an input of [4, 6] floats.
std::string run(const Graph& graph) {
  auto session = std::make_shared<Session>(graph, cpu_kernels());
  std::vector<float> values(24);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) * 0.37f - 3.0f;
  RunContext context(session, session->plan({Dims{4, 6}}));
  const std::vector<const void*> addresses{values.data()};
  const auto outputs = context.forward(addresses);
  return {static_cast<const char*>(outputs[0].block->data()), outputs[0].spec.bytes()};
}

using Ops = std::vector<std::string>;

// ONNX's numbers: 1 float32, 10 float16, 16 bfloat16.
TEST(MoveCasts, ACastBehindALosslessOneReadsWhatThatReads) {
  Graph graph = parse_graph(R"(
    graph g (float32[n, 6] x) => (y) {
      a = Cast <to = 16> (x)
      b = Cast <to = 1> (a)
      c = Cast <to = 16> (b)
      d = Cast <to = 11> (b)
      e = Cast <to = 11> (c)
      y = Add(d, e)
    })");
  const std::string expected = run(graph);
  EXPECT_TRUE(apply(graph));
  EXPECT_EQ(ops_of(graph), (Ops{"Cast", "Cast", "Cast", "Add"}));
  EXPECT_EQ(run(graph), expected);
}

TEST(MoveCasts, NarrowingComesBeforeTransposesAndViews) {
  Graph graph = parse_graph(R"(
    graph g (float32[n, 6] x) => (y) {
      a = Tanh(x)
      b = Reshape(a, int64[3] {-1, 2, 3})
      c = Transpose <perm = [0, 2, 1]> (b)
      y = Cast <to = 16> (c)
    })");
  const std::string expected = run(graph);
  EXPECT_TRUE(apply(graph));
  EXPECT_EQ(ops_of(graph), (Ops{"Tanh", "Cast", "Reshape", "Transpose"}));
  EXPECT_EQ(input_type(graph, "Transpose"), DType::bf16);
  EXPECT_EQ(run(graph), expected);
  EXPECT_FALSE(apply(graph));
}

TEST(MoveCasts, WideningComesAfterTransposesAndViews) {
  Graph graph = parse_graph(R"(
    graph g (float32[n, 6] x) => (y) {
      h = Cast <to = 10> (x)
      a = Cast <to = 1> (h)
      b = Unsqueeze(a, int64[1] {0})
      c = Transpose <perm = [0, 2, 1]> (b)
      y = Tanh(c)
    })");
  const std::string expected = run(graph);
  EXPECT_TRUE(apply(graph));
  EXPECT_EQ(ops_of(graph), (Ops{"Cast", "Unsqueeze", "Transpose", "Cast", "Tanh"}));
  EXPECT_EQ(input_type(graph, "Transpose"), DType::f16);
  EXPECT_EQ(run(graph), expected);
  EXPECT_FALSE(apply(graph));
}

TEST(MoveCasts, LeavesOthersAlone) {
  for (const char* text : {
           // Rounds: behind it the value is another one.
           "graph g (float32[n, 6] x) => (y) { a = Cast <to = 16> (x)\n y = Cast <to = 1> (a) }",
           "graph g (float32[n, 6] x) => (y) { a = Cast <to = 16> (x)\n y = Cast <to = 10> (a) }",
           "graph g (float32[n, 6] x) => (y) { a = Cast <to = 7> (x)\n y = Cast <to = 1> (a) }",
           // Somebody else reads the transposed value.
           "graph g (float32[n, 6] x) => (y, t) {\n"
           "  t = Transpose <perm = [1, 0]> (x)\n y = Cast <to = 16> (t) }",
           "graph g (float16[n, 6] x) => (y, a) {\n"
           "  a = Cast <to = 1> (x)\n y = Transpose <perm = [1, 0]> (a) }",
           // More bytes would be moved.
           "graph g (float16[n, 6] x) => (y) {\n"
           "  t = Transpose <perm = [1, 0]> (x)\n y = Cast <to = 1> (t) }",
           "graph g (float32[n, 6] x) => (y) {\n"
           "  a = Cast <to = 16> (x)\n y = Transpose <perm = [1, 0]> (a) }",
           // Of another phase, of another checkpoint.
           "graph g (float32[n, 6] x) => (y) {\n"
           "  t = Transpose <perm = [1, 0]> (x) ~1\n y = Cast <to = 16> (t) ~2 }",
       }) {
    Graph graph = parse_graph(text);
    const std::string before = print_graph(graph);
    EXPECT_FALSE(apply(graph)) << text;
    EXPECT_EQ(print_graph(graph), before);
  }
}

}  // namespace
}  // namespace ortrain
