// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/recompute_elementwise.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/base/half.h"
#include "ortrain/ir/text.h"
#include "ortrain/ir/verifier.h"
#include "ortrain/passes/pipeline.h"
#include "ortrain/runtime/session.h"

namespace ortrain {
namespace {

using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;

// An activation of the product a, between two products.
Graph between_products(const std::string& body, const std::string& type = "float32") {
  Graph graph = parse_graph("graph g (" + type + "[n, 64] x [user grad], " + type +
                            "[64, 64] w [user grad], " + type +
                            "[64, 64] v [user grad], int64[] seed [seed]) => (y) {\n"
                            "  a = MatMul(x, w)\n" +
                            body + "  y = MatMul(h, v)\n}\n");
  build_backward(graph, {.output_indices = {0}});
  graph.remove_dead_nodes();
  graph.sort();
  return graph;
}

bool apply(Graph& graph) {
  const bool changed = recompute_elementwise().run(graph);
  graph.sort();
  graph.remove_dead_nodes();
  verify(graph);
  return changed;
}

Graph fused(Graph graph, Processor processor) {
  run_pipeline(graph, "fuse", StagePart::whole, processor);
  verify(graph);
  return graph;
}

// What the backward reads of the forward's results, by name.
std::vector<std::string> kept(const Graph& graph) {
  std::vector<std::string> names;
  for (size_t v = 0; v < graph.num_values(); ++v) {
    const Value& value = graph.value(static_cast<ValueId>(v));
    if (value.producer == kNoNode || !graph.alive(value.producer)) continue;
    if (graph.node(value.producer).phase != Phase::forward) continue;
    const bool is_read = std::ranges::any_of(graph.order(), [&](NodeId id) {
      const Node& node = graph.node(id);
      return node.phase == Phase::backward && node.op != "Shape" &&
             std::ranges::find(node.inputs, static_cast<ValueId>(v)) != node.inputs.end();
    });
    if (is_read) names.push_back(value.name);
  }
  return names;
}

int count(const Graph& graph, std::string_view op, Phase phase) {
  int found = 0;
  for (NodeId id : graph.order()) {
    found += graph.node(id).op == op && graph.node(id).phase == phase;
  }
  return found;
}

// Inputs and outputs of the Fused nodes of a phase.
std::vector<std::pair<size_t, size_t>> fused_sizes(const Graph& graph, Phase phase) {
  std::vector<std::pair<size_t, size_t>> sizes;
  for (NodeId id : graph.order()) {
    const Node& node = graph.node(id);
    if (node.op != "Fused" || node.phase != phase) continue;
    sizes.emplace_back(node.inputs.size(), node.outputs.size());
  }
  return sizes;
}

// The bytes of outputs and gradients for the same numbers; open extents are 24.
std::vector<std::string> run(const Graph& graph) {
  auto session = std::make_shared<Session>(graph, cpu_kernels());
  std::vector<std::vector<char>> tensors;
  std::vector<const void*> forward, backward;
  std::vector<Dims> dims;
  for (const GraphInput& input : graph.inputs()) {
    const Value& value = graph.value(input.value);
    Dims& sizes = dims.emplace_back();
    for (const Dim& d : value.shape) sizes.push_back(d.is_constant() ? d.constant() : 24);
    const size_t elements = static_cast<size_t>(num_elements(sizes));
    std::vector<char> bytes(elements * size_of(value.dtype), 0);
    for (size_t i = 0; i < elements; ++i) {
      const float x = static_cast<float>((i * 7 + dims.size() * 3 + i / 64) % 29) * 0.03f - 0.4f;
      if (value.dtype == DType::f32) reinterpret_cast<float*>(bytes.data())[i] = x;
      if (value.dtype == DType::bf16) reinterpret_cast<BFloat16*>(bytes.data())[i] = BFloat16(x);
    }
    tensors.push_back(std::move(bytes));
    const bool is_gradient = input.role == InputRole::gradient;
    forward.push_back(is_gradient ? nullptr : tensors.back().data());
    backward.push_back(is_gradient ? tensors.back().data() : nullptr);
  }
  RunContext context(session, session->plan(dims));
  std::vector<std::string> results;
  const auto add = [&](const std::vector<RunOutput>& outputs) {
    for (const RunOutput& output : outputs) {
      if (!output.block) continue;
      results.emplace_back(static_cast<const char*>(output.block->data()), output.spec.bytes());
    }
  };
  add(context.forward(forward));
  add(context.backward(backward));
  return results;
}

void expect_same_bits(const Graph& graph) {
  EXPECT_EQ(run(fused(graph, Processor::cpu)), run(fused(graph, Processor::gpu)));
}

// As transformers writes it out.
constexpr char kGelu[] = R"(
  const half = float32[] {0.5}
  const three = float32[] {3}
  const c = float32[] {0.044715}
  const d = float32[] {0.79788456}
  const one = float32[] {1}
  b = Mul(a, half)
  p = Pow(a, three)
  q = Mul(p, c)
  r = Add(a, q)
  s = Mul(r, d)
  t = Tanh(s)
  u = Add(t, one)
  h = Mul(b, u)
)";

// The same under autocast on a GPU: a product in bfloat16, what Pow touches in float32.
constexpr char kMixedGelu[] = R"(
  const half = bfloat16[] {0.5}
  const three = float32[] {3}
  const c = float32[] {0.044715}
  const d = float32[] {0.79788456}
  const one = float32[] {1}
  b = Mul(a, half)
  wide = Cast <to = 1> (a)
  p = Pow(wide, three)
  q = Mul(p, c)
  r = Add(wide, q)
  s = Mul(r, d)
  t = Tanh(s)
  u = Add(t, one)
  b2 = Cast <to = 1> (b)
  h2 = Mul(b2, u)
  h = Cast <to = 16> (h2)
)";

TEST(RecomputeElementwise, GeluIsComputedAgainFromItsInput) {
  Graph graph = between_products(kGelu);
  EXPECT_THAT(kept(graph), UnorderedElementsAre("a", "b", "t", "u", "h"));
  expect_same_bits(graph);
  EXPECT_THAT(fused_sizes(fused(graph, Processor::gpu), Phase::forward),
              ElementsAre(std::pair(1, 1)));
  EXPECT_THAT(fused_sizes(fused(graph, Processor::gpu), Phase::backward),
              ElementsAre(std::pair(2, 1)));
  EXPECT_TRUE(apply(graph));
  EXPECT_THAT(kept(graph), UnorderedElementsAre("a", "h"));
}

TEST(RecomputeElementwise, TheCpuKeepsAsBefore) {
  const Graph graph = between_products(kGelu);
  EXPECT_THAT(fused_sizes(fused(graph, Processor::cpu), Phase::forward),
              ElementsAre(std::pair(1, 4)));
}

TEST(RecomputeElementwise, MixedTypesKeepTheNarrowInput) {
  Graph graph = between_products(kMixedGelu, "bfloat16");
  expect_same_bits(graph);
  const Graph with = fused(graph, Processor::gpu);
  EXPECT_THAT(fused_sizes(with, Phase::forward), ElementsAre(std::pair(1, 1)));
  EXPECT_THAT(fused_sizes(with, Phase::backward), ElementsAre(std::pair(2, 1)));
  EXPECT_TRUE(apply(graph));
  EXPECT_THAT(kept(graph), UnorderedElementsAre("a", "h"));
}

TEST(RecomputeElementwise, NarrowValuesAreRoundedAsInMemory) {
  Graph graph = between_products("  s = Sigmoid(a)\n  h = Mul(a, s)\n", "bfloat16");
  expect_same_bits(graph);
  EXPECT_TRUE(apply(graph));
  EXPECT_EQ(count(graph, "Cast", Phase::backward), 1);
  EXPECT_THAT(kept(graph), UnorderedElementsAre("a", "h"));
}

TEST(RecomputeElementwise, GatesShareAKernel) {
  Graph graph =
      between_products("  g = MatMul(x, v)\n  s = Sigmoid(a)\n  b = Mul(a, s)\n  h = Mul(b, g)\n");
  expect_same_bits(graph);
  EXPECT_THAT(fused_sizes(fused(graph, Processor::gpu), Phase::backward),
              ElementsAre(std::pair(3, 2)));
  EXPECT_TRUE(apply(graph));
  EXPECT_THAT(kept(graph), UnorderedElementsAre("a", "g", "h"));
}

TEST(RecomputeElementwise, ValuesPerRowAreComputedAgainToo) {
  Graph graph = between_products(
      "  const last = int64[1] {-1}\n  m = ReduceMean <keepdims = 1> (a, last)\n  e = Exp(m)\n"
      "  d = Sub(a, e)\n  f = Tanh(d)\n  k = Mul(f, d)\n  h = Mul(k, d)\n");
  expect_same_bits(graph);
  EXPECT_TRUE(apply(graph));
  EXPECT_THAT(kept(graph), UnorderedElementsAre("a", "e", "h"));
}

TEST(RecomputeElementwise, WhatCostsAsMuchToKeepStays) {
  for (const char* body : {"  h = Tanh(a)\n", "  h = Relu(a)\n", "  h = Mul(a, a)\n"}) {
    Graph graph = between_products(body);
    const std::string before = print_graph(graph);
    EXPECT_FALSE(apply(graph)) << body;
    EXPECT_EQ(print_graph(graph), before);
  }
}

// As many bytes, but a is written by its product whoever reads it.
TEST(RecomputeElementwise, WhatIsWrittenAnywayIsKept) {
  Graph graph = between_products("  s = Tanh(a)\n  h = Exp(s)\n");
  EXPECT_THAT(kept(graph), UnorderedElementsAre("s", "h"));
  expect_same_bits(graph);
  EXPECT_TRUE(apply(graph));
  EXPECT_THAT(kept(graph), UnorderedElementsAre("a", "h"));
}

TEST(RecomputeElementwise, OtherNodesRunOnce) {
  Graph graph = between_products(
      "  s = Softmax <axis = 1> (a)\n  b = Mul(s, s)\n  const last = int64[1] {-1}\n"
      "  m = ReduceMean <keepdims = 1> (b, last)\n  c = Mul(b, m)\n  h = Mul(c, s)\n");
  apply(graph);
  EXPECT_EQ(count(graph, "Softmax", Phase::backward), 0);
  EXPECT_EQ(count(graph, "ReduceMean", Phase::backward), 0);
  EXPECT_EQ(count(graph, "MatMul", Phase::backward),
            count(between_products("  h = Identity(a)\n"), "MatMul", Phase::backward));
  expect_same_bits(graph);
}

TEST(RecomputeElementwise, DropoutRunsOnce) {
  Graph graph = between_products(
      "  b = ortrain::Dropout <stream = 0, ratio = 0.5> (a, seed)\n  h = Mul(b, b)\n");
  EXPECT_FALSE(apply(graph));
  EXPECT_THAT(kept(graph), UnorderedElementsAre("b", "h"));
}

TEST(RecomputeElementwise, CheckpointsStayAsTheyAreMarked) {
  Graph graph = between_products("  s = Sigmoid(a) ~1\n  h = Mul(a, s) ~1\n");
  EXPECT_FALSE(apply(graph));
}

TEST(RecomputeElementwise, ResultsOfTheGraphAreReadWhereTheyAre) {
  Graph graph = parse_graph(
      "graph g (float32[n, 64] x [user grad], float32[64, 64] w [user grad]) => (y, s) {\n"
      "  a = MatMul(x, w)\n  s = Sigmoid(a)\n  h = Mul(a, s)\n  y = MatMul(h, w)\n}\n");
  build_backward(graph, {.output_indices = {0}});
  graph.remove_dead_nodes();
  graph.sort();
  EXPECT_FALSE(apply(graph));
}

// A caller may write to it, and PyTorch's backward would not notice.
TEST(RecomputeElementwise, InputsAreNotReadForIt) {
  for (const bool is_input : {true, false}) {
    Graph graph = parse_graph(
        std::string("graph g (bfloat16[n, 64] x [user grad], float32[64, 64] v [user grad], "
                    "bfloat16[64, 64] w) => (y) {\n") +
        "  a = " +
        (is_input ? "Exp(x)\n  b = Cast <to = 1> (x)" : "MatMul(x, w)\n  b = Cast <to = 1> (a)") +
        "\n  s = Sigmoid(b)\n  h = Mul(b, s)\n  y = MatMul(h, v)\n}\n");
    build_backward(graph, {.output_indices = {0}});
    graph.remove_dead_nodes();
    graph.sort();
    EXPECT_TRUE(apply(graph));
    if (is_input) {
      EXPECT_THAT(kept(graph), UnorderedElementsAre("b", "h"));
    } else {
      EXPECT_THAT(kept(graph), UnorderedElementsAre("a", "h"));
    }
  }
}

TEST(RecomputeElementwise, WhatTwoKernelsReadIsKept) {
  Graph graph =
      between_products("  s = Sigmoid(a)\n  b = Mul(a, s)\n  c = MatMul(b, w)\n  h = Mul(c, s)\n");
  EXPECT_FALSE(apply(graph));
}

// A view of it is kept for a product: nothing is saved by computing it again.
TEST(RecomputeElementwise, WhatAViewHoldsStays) {
  Graph graph = between_products(
      "  const flat = int64[2] {-1, 32}\n  const back = int64[2] {-1, 64}\n  s = Sigmoid(a)\n"
      "  r = Reshape(s, flat)\n  r2 = Softmax <axis = 1> (r)\n  r3 = Mul(r2, r)\n"
      "  r4 = Reshape(r3, back)\n  h = Mul(r4, s)\n");
  const std::vector<std::string> before = kept(graph);
  apply(graph);
  EXPECT_EQ(kept(graph), before);
}

TEST(RecomputeElementwise, LeavesAForwardAlone) {
  Graph graph =
      parse_graph("graph g (float32[n, 64] x) => (y) {\n  s = Sigmoid(x)\n  y = Mul(x, s)\n}\n");
  EXPECT_FALSE(apply(graph));
}

}  // namespace
}  // namespace ortrain
