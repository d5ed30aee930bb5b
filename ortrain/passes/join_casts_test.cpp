// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/join_casts.h"

#include <gtest/gtest.h>

#include "ortrain/ir/text.h"
#include "ortrain/ir/verifier.h"
#include "ortrain/passes/pipeline.h"
#include "ortrain/runtime/session.h"

namespace ortrain {
namespace {

bool apply(Graph& graph) {
  const bool changed = join_casts().run(graph);
  graph.sort();
  graph.remove_dead_nodes();
  verify(graph);
  return changed;
}

int count(const Graph& graph, std::string_view op) {
  int found = 0;
  for (NodeId id : graph.order()) found += graph.node(id).op == op;
  return found;
}

// The bytes of the first output.
std::string run(const Graph& graph, const std::vector<Dims>& dims) {
  auto session = std::make_shared<Session>(graph, cpu_kernels());
  std::vector<std::vector<float>> values;
  std::vector<const void*> addresses;
  for (const Dims& shape : dims) {
    std::vector<float>& list = values.emplace_back(static_cast<size_t>(num_elements(shape)));
    for (size_t i = 0; i < list.size(); ++i) list[i] = 0.37f * static_cast<float>(i) - 1.3f;
  }
  for (const std::vector<float>& list : values) addresses.push_back(list.data());
  RunContext context(session, session->plan(dims));
  const auto outputs = context.forward(addresses);
  return {static_cast<const char*>(outputs[0].block->data()), outputs[0].spec.bytes()};
}

// ONNX's numbers: 1 float32, 10 float16, 16 bfloat16.
TEST(JoinCasts, JoinsThoseOfInputsByTheirTypes) {
  Graph graph = parse_graph(R"(
    graph g (float32[3, 4] x, float32[5, 4] w, float32[5] b, float32[5] c) => (y) {
      x2 = Cast <to = 16> (x)
      w2 = Cast <to = 16> (w)
      b2 = Cast <to = 16> (b)
      h = Cast <to = 10> (c)
      z2 = ortrain::Linear (x2, w2, b2)
      z = Cast <to = 1> (z2)
      d = Cast <to = 1> (h)
      y = Add (z, d)
    })");
  const std::vector<Dims> dims{{3, 4}, {5, 4}, {5}, {5}};
  const std::string expected = run(graph, dims);
  EXPECT_TRUE(apply(graph));
  EXPECT_EQ(count(graph, "CastEach"), 1);
  EXPECT_EQ(count(graph, "Cast"), 3);  // of c, which is alone, and of what is computed
  EXPECT_EQ(run(graph, dims), expected);
  EXPECT_FALSE(apply(graph));
}

TEST(JoinCasts, LeavesOpenExtentsAndWhatIsLarge) {
  Graph open = parse_graph(R"(
    graph g (float32[n, 4] x, float32[n] z) => (x2, z2) {
      x2 = Cast <to = 16> (x)
      z2 = Cast <to = 16> (z)
    })");
  EXPECT_FALSE(apply(open));
  // 32 MiB of results in each group; what alone is more is left.
  Graph large = parse_graph(R"(
    graph g (float32[4096, 2048] a, float32[4096, 2048] b, float32[4096, 1024] c, float32[4] d,
        float32[9000, 4096] e) => (v, w, x, y, z) {
      v = Cast <to = 16> (a)
      w = Cast <to = 16> (b)
      x = Cast <to = 16> (c)
      y = Cast <to = 16> (d)
      z = Cast <to = 16> (e)
    })");
  EXPECT_TRUE(apply(large));
  EXPECT_EQ(count(large, "CastEach"), 2);
  EXPECT_EQ(count(large, "Cast"), 1);
}

TEST(JoinCasts, LeavesWhatIsComputed) {
  Graph without_inputs = parse_graph(R"(
    graph g () => (y, z) {
      const s = int64[1] {4}
      r = ConstantOfShape <value = float32[1] {1.5}> (s)
      y = Cast <to = 16> (r)
      z = Cast <to = 10> (r)
    })");
  EXPECT_FALSE(apply(without_inputs));
  // A group that is full becomes a node before the casts behind it are looked at.
  std::string inputs, casts, results;
  for (int i = 0; i < 300; ++i) {
    const std::string k = std::to_string(i);
    inputs += (i ? ", float32[2] w" : "float32[2] w") + k;
    results += (i ? ", u" : "u") + k;
    casts +=
        "  y" + k + " = Cast <to = 16> (w" + k + ")\n  u" + k + " = Cast <to = 1> (y" + k + ")\n";
  }
  Graph graph = parse_graph("graph g (" + inputs + ") => (" + results + ") {\n" + casts + "}");
  EXPECT_TRUE(apply(graph));
  EXPECT_EQ(count(graph, "CastEach"), 4);  // of 96 at most
  EXPECT_EQ(count(graph, "Cast"), 300);
}

TEST(JoinCasts, IsLeftOutUnderABudgetAndOnTheCpu) {
  const Graph graph = parse_graph(R"(
    graph g (float32[4] a, float32[4] b) => (v, w) {
      v = Cast <to = 16> (a)
      w = Cast <to = 16> (b)
    })");
  for (const auto& [part, processor, joined] : {std::tuple{StagePart::whole, Processor::gpu, 1},
                                                {StagePart::whole, Processor::cpu, 0},
                                                {StagePart::behind_recompute, Processor::gpu, 0}}) {
    Graph made = graph;
    run_pipeline(made, "fuse", part, processor);
    EXPECT_EQ(count(made, "CastEach"), joined);
  }
}

TEST(JoinCasts, LeavesCheckpointsAndIntegers) {
  Graph graph = parse_graph(R"(
    graph g (float32[4] a, float32[4] b, int32[4] c, int32[4] d) => (v, w, x, y) {
      v = Cast <to = 16> (a)
      w = Cast <to = 16> (b)
      x = Cast <to = 1> (c)
      y = Cast <to = 1> (d)
    })");
  Graph inside = graph;
  for (NodeId id : inside.order()) inside.node(id).checkpoint = 1;
  EXPECT_FALSE(apply(inside));
  EXPECT_TRUE(apply(graph));
  EXPECT_EQ(count(graph, "Cast"), 2);
}

}  // namespace
}  // namespace ortrain
