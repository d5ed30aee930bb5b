// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/mixed_precision.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/base/error.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/text.h"
#include "ortrain/ir/verifier.h"
#include "ortrain/passes/pipeline.h"
#include "ortrain/runtime/session.h"

namespace ortrain {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

bool apply(Graph& graph, const MixedPrecision& options = {}) {
  const bool changed = mixed_precision(graph, options);
  verify(graph);
  return changed;
}

// The type of the first output of each operator's last node.
std::map<std::string, DType> types_of(const Graph& graph) {
  std::map<std::string, DType> types;
  for (NodeId id : graph.order()) {
    types[graph.node(id).op] = graph.value(graph.node(id).outputs[0]).dtype;
  }
  return types;
}

int count(const Graph& graph, std::string_view op) {
  int found = 0;
  for (NodeId id : graph.order()) found += graph.node(id).op == op;
  return found;
}

// Outputs and gradients; every input is [4, 4] of floats.
std::vector<std::vector<float>> run(Graph graph) {
  build_backward(graph, {.output_indices = {0}});
  graph.remove_dead_nodes();
  graph.sort();
  run_pipeline(graph, "fuse");
  auto session = std::make_shared<Session>(graph, cpu_kernels());
  std::vector<std::vector<float>> tensors;
  std::vector<const void*> forward, backward;
  for (const GraphInput& input : graph.inputs()) {
    std::vector<float> values(16);
    for (size_t j = 0; j < values.size(); ++j) {
      values[j] = static_cast<float>((j * 7 + tensors.size() * 3) % 23) * 0.1f - 1.0f;
    }
    tensors.push_back(std::move(values));
    const bool is_gradient = input.role == InputRole::gradient;
    forward.push_back(is_gradient ? nullptr : tensors.back().data());
    backward.push_back(is_gradient ? tensors.back().data() : nullptr);
  }
  RunContext context(session, session->plan(std::vector<Dims>(tensors.size(), Dims{4, 4})));
  std::vector<std::vector<float>> results;
  for (const auto& outputs : {context.forward(forward), context.backward(backward)}) {
    for (const RunOutput& output : outputs) {
      if (!output.block) continue;
      EXPECT_EQ(output.spec.dtype, DType::f32);
      const auto* data = static_cast<const float*>(output.block->data());
      results.emplace_back(data, data + output.spec.numel());
    }
  }
  return results;
}

constexpr char kModel[] = R"(
graph g (float32[n, 4] x [user], float32[4, 4] w [parameter grad], float32[4, 4] b [parameter grad])
    => (y) {
  a = MatMul(x, w)
  c = Mul(a, float32 0.5)
  d = Relu(c)
  e = MatMul(d, w)
  f = Add(e, b)
  g = Softmax <axis = 1> (f)
  h = Tanh(e)
  y = Add(g, h)
}
)";

TEST(MixedPrecision, ProductsRunIn16BitsAndWhatLosesByItDoesNot) {
  Graph graph = parse_graph(kModel);
  EXPECT_TRUE(apply(graph));
  const auto types = types_of(graph);
  EXPECT_EQ(types.at("MatMul"), DType::bf16);
  EXPECT_EQ(types.at("Relu"), DType::bf16);
  EXPECT_EQ(types.at("Mul"), DType::bf16);  // a constant of one element promotes nothing
  EXPECT_EQ(types.at("Tanh"), DType::bf16);
  EXPECT_EQ(types.at("Softmax"), DType::f32);
  EXPECT_EQ(types.at("Add"), DType::f32);  // meets a parameter, then the softmax
  EXPECT_EQ(graph.value(graph.outputs()[0].value).dtype, DType::f32);
}

TEST(MixedPrecision, AValueIsCastOnce) {
  Graph graph = parse_graph(kModel);
  apply(graph);
  // x, w (of which two products read), e and h.
  EXPECT_EQ(count(graph, "Cast"), 4);
}

TEST(MixedPrecision, EqualResultsWithinTheTypeAndGradientsInFloat32) {
  const Graph before = parse_graph(kModel);
  const auto expected = run(before);
  for (const auto& [dtype, tolerance] : {std::pair{DType::bf16, 0.03f}, {DType::f16, 0.004f}}) {
    Graph graph = before;
    apply(graph, {.dtype = dtype});
    const auto actual = run(graph);
    ASSERT_EQ(actual.size(), expected.size());
    ASSERT_EQ(actual.size(), 3u);
    for (size_t k = 0; k < actual.size(); ++k) {
      ASSERT_EQ(actual[k].size(), expected[k].size());
      for (size_t i = 0; i < actual[k].size(); ++i) {
        EXPECT_NEAR(actual[k][i], expected[k][i],
                    tolerance * std::max(1.0f, std::abs(expected[k][i])));
      }
    }
  }
}

TEST(MixedPrecision, OutputsKeepTheirTypes) {
  Graph graph = parse_graph(R"(
    graph g (float32[n, 4] x, float32[4, 4] w) => (y) { y = MatMul(x, w) })");
  EXPECT_TRUE(apply(graph));
  EXPECT_EQ(graph.value(graph.outputs()[0].value).dtype, DType::f32);
  EXPECT_EQ(count(graph, "Cast"), 3);
}

TEST(MixedPrecision, LeavesGraphsWithoutProductsAlone) {
  for (const char* text : {
           "graph g (float32[n, 4] x) => (y) { a = Tanh(x)\n y = Softmax <axis = 1> (a) }",
           "graph g (float64[n, 4] x, float64[4, 4] w) => (y) { y = MatMul(x, w) }",
           "graph g (int64[n, 4] x, int64[4, 4] w) => (y) { y = MatMul(x, w) }",
           "graph g (bfloat16[n, 4] x, bfloat16[4, 4] w) => (y) { y = MatMul(x, w) }",
           "graph g (float16[n, 4] x, float16[4, 4] w) => (y) { y = MatMul(x, w) }",
       }) {
    Graph graph = parse_graph(text);
    const std::string before = print_graph(graph);
    EXPECT_FALSE(apply(graph)) << text;
    EXPECT_EQ(print_graph(graph), before);
  }
}

TEST(MixedPrecision, ConstantsThat16BitsDoNotHoldAreReadInFloat32) {
  const char* text = R"(
    graph g (float32[n, 4] x, float32[4, 4] w, bool[n, 4] m) => (y) {
      a = MatMul(x, w)
      y = Where(m, a, float32 -1e9)
    })";
  Graph bf16 = parse_graph(text), f16 = parse_graph(text);
  apply(bf16);
  apply(f16, {.dtype = DType::f16});
  EXPECT_EQ(types_of(bf16).at("Where"), DType::bf16);
  EXPECT_EQ(types_of(f16).at("Where"), DType::f32);
}

TEST(MixedPrecision, ListsTakeOperatorsOutOfThoseOfTheirDefinitions) {
  Graph graph = parse_graph(kModel);
  apply(graph, {.allow = {"Add", "Softmax"}, .deny = {"Relu"}, .promote = {}});
  const auto types = types_of(graph);
  EXPECT_EQ(types.at("Softmax"), DType::bf16);
  EXPECT_EQ(types.at("Add"), DType::bf16);
  EXPECT_EQ(types.at("Relu"), DType::f32);

  Graph none = parse_graph(kModel);
  EXPECT_FALSE(apply(none, {.promote = {"MatMul"}}));
}

TEST(MixedPrecision, Refusals) {
  Graph graph = parse_graph(kModel);
  const auto refuses = [&](MixedPrecision options, const std::string& text) {
    EXPECT_THAT([&] { mixed_precision(graph, options); },
                ThrowsMessage<InvalidModelError>(HasSubstr(text)));
  };
  refuses({.dtype = DType::f32}, "mixed precision in float32, expected bfloat16 or float16");
  refuses({.allow = {"MatMull"}}, "'MatMull' in the list 'allow' is no operator");
  refuses({.allow = {"MatMul"}, .deny = {"MatMul"}}, "'MatMul' stands in the lists twice");
  refuses({.allow = {"Not"}}, "'Not' in the list 'allow' is not computed in bfloat16");
}

// A definition that asks for 16 bits has to have them.
TEST(MixedPrecision, AllowedOperatorsAreComputedIn16Bits) {
  int allowed = 0;
  for (const OpDef* def : op_registry().all()) {
    if (def->precision != Precision::allow) continue;
    ++allowed;
    EXPECT_TRUE(std::ranges::any_of(def->types, [](const auto& type) {
      return type.second.contains(DType::bf16) && type.second.contains(DType::f16);
    })) << def->name;
  }
  EXPECT_GE(allowed, 8);
}

}  // namespace
}  // namespace ortrain
