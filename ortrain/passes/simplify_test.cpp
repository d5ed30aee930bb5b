// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "ortrain/ir/graph_builder.h"
#include "ortrain/ir/text.h"
#include "ortrain/ir/verifier.h"
#include "ortrain/passes/accumulate_products.h"
#include "ortrain/passes/eliminate_identity.h"
#include "ortrain/passes/fold_known_shapes.h"
#include "ortrain/passes/merge_attention_heads.h"
#include "ortrain/passes/merge_common.h"
#include "ortrain/passes/pass_notes.h"
#include "ortrain/passes/pipeline.h"
#include "ortrain/runtime/session.h"

namespace ortrain {
namespace {

bool apply(const Pass& pass, Graph& graph) {
  const bool changed = pass.run(graph);
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

// Outputs for the same inputs (float32, filled with a fixed pattern) at the given shapes.
std::vector<std::vector<float>> outputs_of(const Graph& graph, const std::vector<Dims>& dims) {
  auto session = std::make_shared<Session>(graph, cpu_kernels());
  const auto plan = session->plan(dims);
  std::vector<std::vector<float>> inputs;
  std::vector<const void*> addresses;
  for (size_t i = 0; i < dims.size(); ++i) {
    std::vector<float> values(static_cast<size_t>(num_elements(dims[i])));
    for (size_t j = 0; j < values.size(); ++j) {
      values[j] = static_cast<float>((j * 7 + i * 3) % 11) * 0.25f - 1.0f;
    }
    inputs.push_back(std::move(values));
    addresses.push_back(inputs.back().data());
  }
  RunContext context(session, plan);
  std::vector<std::vector<float>> results;
  for (const RunOutput& output : context.forward(addresses)) {
    const auto* data = static_cast<const float*>(output.block->data());
    results.emplace_back(data, data + output.spec.numel());
  }
  return results;
}

void expect_equal_results(const Graph& before, const Graph& after, const std::vector<Dims>& dims,
                          float tolerance = 0.0f) {
  const auto expected = outputs_of(before, dims);
  const auto actual = outputs_of(after, dims);
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(expected[i].size(), actual[i].size());
    for (size_t j = 0; j < expected[i].size(); ++j) {
      EXPECT_NEAR(actual[i][j], expected[i][j], tolerance) << "output " << i << " element " << j;
    }
  }
}

// One user input per shape text, named x0, x1, ...
struct Fixture {
  Graph graph;
  GraphBuilder builder{graph};
  std::vector<ValueId> x;

  explicit Fixture(const std::vector<Shape>& shapes) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      x.push_back(graph.add_input({.role = InputRole::user}, "x" + std::to_string(i), DType::f32,
                                  shapes[i]));
    }
  }
  void output(ValueId value) {
    graph.add_output({.value = value, .name = "y" + std::to_string(graph.outputs().size())});
  }
};

const Dim kB = Dim::symbol("b");
const Dim kS = Dim::symbol("s");

TEST(fold_known_shapes, fires_on_integer_extents) {
  Fixture f({{kB, 6}});
  const ValueId shape = f.builder.op("Shape", {f.x[0]});
  const ValueId width =
      f.builder.op("Gather", {shape, f.builder.int64s({1})}, {{"axis", int64_t{0}}});
  const ValueId target =
      f.builder.op("Concat", {f.builder.int64s({-1}), width}, {{"axis", int64_t{0}}});
  f.output(f.builder.op("Reshape", {f.x[0], target}));
  const Graph before = f.graph;
  EXPECT_TRUE(apply(fold_known_shapes(), f.graph));
  EXPECT_EQ(count(f.graph, "Shape"), 0);
  expect_equal_results(before, f.graph, {{4, 6}});
}

TEST(fold_known_shapes, must_not_fire_on_symbols) {
  Fixture f({{kB, kS}});
  const ValueId shape = f.builder.op("Shape", {f.x[0]});
  f.output(f.builder.op("Reshape", {f.x[0], shape}));
  EXPECT_FALSE(apply(fold_known_shapes(), f.graph));
  EXPECT_EQ(count(f.graph, "Shape"), 1);
}

TEST(eliminate_identity, fires_on_each_kind) {
  Fixture f({{kB, 6}});
  ValueId v = f.builder.op("Identity", {f.x[0]});
  v = f.builder.op("Cast", {v}, {{"to", int64_t{1}}});
  v = f.builder.op("Transpose", {v}, {{"perm", std::vector<int64_t>{0, 1}}});
  v = f.builder.reshape(v, {0, 6});
  f.output(f.builder.unary("Relu", v));
  const Graph before = f.graph;
  EXPECT_TRUE(apply(eliminate_identity(), f.graph));
  EXPECT_EQ(f.graph.order().size(), 1u);
  expect_equal_results(before, f.graph, {{3, 6}});
}

TEST(eliminate_identity, joins_transposes_and_reshapes) {
  Fixture f({{kB, 2, 6}});
  ValueId v = f.builder.transpose(f.x[0], {1, 0, 2});
  v = f.builder.transpose(v, {1, 0, 2});
  v = f.builder.reshape(v, {0, 12});
  v = f.builder.reshape(v, {0, 3, 4});
  f.output(v);
  const Graph before = f.graph;
  EXPECT_TRUE(apply(eliminate_identity(), f.graph));
  apply(eliminate_identity(), f.graph);
  EXPECT_EQ(count(f.graph, "Transpose"), 0);
  EXPECT_EQ(count(f.graph, "Reshape"), 1);
  expect_equal_results(before, f.graph, {{5, 2, 6}});
}

TEST(eliminate_identity, must_not_join_reshapes_that_copy_another_extent) {
  Fixture f({{kB, 6}});
  ValueId v = f.builder.reshape(f.x[0], {-1, 2});
  v = f.builder.reshape(v, {0, 1, 2});  // 0 copies 3 b, not b
  f.output(v);
  const Graph before = f.graph;
  apply(eliminate_identity(), f.graph);
  EXPECT_EQ(count(f.graph, "Reshape"), 2);
  expect_equal_results(before, f.graph, {{4, 6}});
}

TEST(eliminate_identity, must_not_fire_on_a_real_transpose) {
  Fixture f({{kB, 6}});
  f.output(f.builder.transpose(f.x[0], {1, 0}));
  EXPECT_FALSE(apply(eliminate_identity(), f.graph));
}

TEST(merge_common, fires_on_equal_nodes) {
  Fixture f({{kB, 6}});
  const ValueId a = f.builder.unary("Exp", f.x[0]);
  const ValueId b = f.builder.unary("Exp", f.x[0]);
  f.output(f.builder.add(a, b));
  const Graph before = f.graph;
  EXPECT_TRUE(apply(merge_common(), f.graph));
  EXPECT_EQ(count(f.graph, "Exp"), 1);
  expect_equal_results(before, f.graph, {{3, 6}});
}

TEST(merge_common, must_not_fire_on_attributes_phases_or_random_numbers) {
  Fixture f({{kB, 6}});
  const ValueId seed = f.graph.add_input({.role = InputRole::seed}, "seed", DType::i64, Shape{});
  const Attributes dropout{{"ratio", 0.5}, {"stream", int64_t{1}}};
  ValueId v = f.builder.add(f.builder.own("Dropout", {f.x[0], seed}, dropout),
                            f.builder.own("Dropout", {f.x[0], seed}, dropout));
  v = f.builder.add(v, f.builder.op("LeakyRelu", {v}, {{"alpha", 0.1}}));
  v = f.builder.add(v, f.builder.op("LeakyRelu", {v}, {{"alpha", 0.2}}));
  f.output(v);
  const ValueId e = f.builder.unary("Exp", f.x[0]);
  f.output(e);
  f.builder.set_phase(Phase::backward);
  f.graph.add_output({.value = f.builder.unary("Exp", f.x[0]),
                      .name = "late",
                      .role = OutputRole::gradient,
                      .target = "x0"});
  EXPECT_FALSE(apply(merge_common(), f.graph));
}

// Attention over heads split from [b, s, h * d] by reshape and transpose.
Fixture attention_graph(bool output_is_read_elsewhere) {
  Fixture f({{kB, kS, 8}, {kB, kS, 8}, {kB, kS, 8}});
  std::vector<ValueId> heads;
  for (ValueId x : f.x)
    heads.push_back(f.builder.transpose(f.builder.reshape(x, {0, 0, 2, 4}), {0, 2, 1, 3}));
  const ValueId out = f.builder.own("Attention", heads);
  const ValueId merged = f.builder.transpose(out, {0, 2, 1, 3});
  f.output(f.builder.reshape(merged, {0, 0, 8}));
  if (output_is_read_elsewhere) f.output(f.builder.unary("Neg", out));
  return f;
}

TEST(merge_attention_heads, fires_and_leaves_no_transpose) {
  Fixture f = attention_graph(false);
  const Graph before = f.graph;
  EXPECT_TRUE(apply(merge_attention_heads(), f.graph));
  apply(eliminate_identity(), f.graph);
  apply(eliminate_identity(), f.graph);
  EXPECT_EQ(count(f.graph, "Transpose"), 0);
  expect_equal_results(before, f.graph, {{2, 5, 8}, {2, 5, 8}, {2, 5, 8}}, 1e-6f);
}

TEST(merge_attention_heads, must_not_fire_when_the_heads_are_read) {
  Fixture f = attention_graph(true);
  const PassNotes notes;
  EXPECT_FALSE(apply(merge_attention_heads(), f.graph));
  ASSERT_EQ(notes.all().size(), 1u);
  EXPECT_FALSE(notes.all()[0].taken);
  EXPECT_EQ(notes.all()[0].nodes[0].op, "Attention");
}

TEST(accumulate_products, fires_on_a_sum_of_products) {
  Fixture f({{kB, 6}, {6, 4}, {kB, 4}, {kB, 6}});
  const ValueId a = f.builder.own("LinearInputGrad", {f.x[0], f.x[1]});
  const ValueId b = f.builder.own("LinearInputGrad", {f.x[3], f.x[1]});
  f.output(f.builder.add(f.builder.add(f.x[2], a), b));
  const Graph before = f.graph;
  const PassNotes notes;
  EXPECT_TRUE(apply(accumulate_products(), f.graph));
  ASSERT_EQ(notes.all().size(), 2u);
  EXPECT_TRUE(notes.all()[0].taken && notes.all()[1].taken);
  EXPECT_EQ(count(f.graph, "Add"), 0);
  expect_equal_results(before, f.graph, {{3, 6}, {6, 4}, {3, 4}, {3, 6}}, 1e-5f);
}

TEST(accumulate_products, must_not_fire_on_a_broadcast_or_a_shared_product) {
  Fixture f({{kB, 6}, {6, 4}, {4}, {kB, 4}});
  const ValueId a = f.builder.own("LinearInputGrad", {f.x[0], f.x[1]});
  f.output(f.builder.add(a, f.x[2]));
  const ValueId b = f.builder.own("LinearInputGrad", {f.x[0], f.x[1]});
  f.output(f.builder.add(b, f.x[3]));
  f.output(b);
  const PassNotes notes;
  EXPECT_FALSE(apply(accumulate_products(), f.graph));
  ASSERT_EQ(notes.all().size(), 2u);
  EXPECT_EQ(notes.all()[0].reason, "their shapes differ");
  EXPECT_EQ(notes.all()[1].reason, "others read the product too");
}

TEST(pipeline, refuses_an_unknown_stage) {
  Graph graph;
  EXPECT_ANY_THROW(run_pipeline(graph, "nonsense"));
}

}  // namespace
}  // namespace ortrain
