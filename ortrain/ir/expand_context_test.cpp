// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/expand_context.h"

#include <gtest/gtest.h>

#include "ortrain/base/error.h"
#include "ortrain/ir/graph_assembler.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/text.h"
#include "ortrain/ir/verifier.h"

namespace ortrain {
namespace {

OpDef doubled_def() {
  return {.name = "Doubled",
          .since = 5,
          .summary = "X + X, and X.",
          .inputs = {{"X", "T"}},
          .outputs = {{"Y", "T"}, {"Z", "T", Arity::optional}},
          .attrs = {{"times", int64_t{1}}},
          .types = {{"T", kFloatTypes}},
          .expand = [](ExpandContext& e) {
            return std::vector{e.add(e.input(0), e.input(0)), e.input(0)};
          }};
}

ValueId add_x(Graph& graph) {
  return graph.add_input({kNoValue, InputRole::user, "", false}, "x", DType::f32,
                         {Dim::symbol("n"), Dim(3)});
}

TEST(Expand, nodes_take_layer_phase_and_checkpoint) {
  Graph graph;
  const ValueId x = add_x(graph);
  Node node;
  node.op = "Doubled";
  node.name = "layer";
  node.phase = Phase::backward;
  node.checkpoint = 2;
  node.inputs = {x};
  node.outputs = {1, kNoValue};
  const std::vector<ValueId> made = expand_node(graph, doubled_def(), node);
  ASSERT_EQ(made.size(), 2u);
  EXPECT_EQ(made[1], kNoValue);
  const Node& added = graph.node(graph.value(made[0]).producer);
  EXPECT_EQ(added.op, "Add");
  EXPECT_EQ(added.name, "layer");
  EXPECT_EQ(added.phase, Phase::backward);
  EXPECT_EQ(added.checkpoint, 2);
}

TEST(Expand, arity_types_and_attributes_are_checked) {
  Graph graph;
  const ValueId x = add_x(graph);
  const ValueId i = graph.add_constant(TensorData::int64s({1}));
  Node node;
  node.op = "Doubled";
  node.outputs = {7};
  node.inputs = {i};
  EXPECT_THROW(expand_node(graph, doubled_def(), node), DTypeError);
  node.inputs = {x, x};
  EXPECT_THROW(expand_node(graph, doubled_def(), node), InvalidModelError);
  node.inputs = {x};
  node.attributes = {{"unknown", int64_t{1}}};
  EXPECT_THROW(expand_node(graph, doubled_def(), node), InvalidModelError);
  node.attributes = {{"times", 1.0}};
  EXPECT_THROW(expand_node(graph, doubled_def(), node), InvalidModelError);
  node.attributes.clear();
  node.outputs = {7, 8, 9};
  EXPECT_THROW(expand_node(graph, doubled_def(), node), InvalidModelError);
  OpDef forgetful = doubled_def();
  forgetful.expand = [](ExpandContext&) { return std::vector<ValueId>{}; };
  node.outputs = {7};
  EXPECT_THROW(expand_node(graph, forgetful, node), InternalError);
}

TEST(Expand, files_name_what_comes_of_a_node) {
  OpRegistry registry;
  register_all_ops(registry);
  registry.add(doubled_def());
  GraphAssembler assembler(registry);
  const ValueId x =
      assembler.add_input({kNoValue, InputRole::user, "", false}, "x", DType::f32, {});
  assembler.add_node({.op = "Doubled", .inputs = {x}, .outputs = {"y", "z"}});
  EXPECT_EQ(assembler.find("z"), x);
  assembler.add_node({.op = "Neg", .inputs = {assembler.find("y")}, .outputs = {"Add"}});
  EXPECT_THROW(assembler.add_node({.op = "Doubled", .inputs = {x}, .outputs = {"y"}}),
               InvalidModelError);
  EXPECT_THROW(assembler.add_node({.op = "Doubled", .inputs = {x}, .outputs = {"a", "a"}}),
               InvalidModelError);
  assembler.graph().add_output({assembler.find("Add"), "out", OutputRole::user, ""});
  verify(assembler.graph());
}

TEST(OpRegistry, keeps_composites_and_earlier_meanings_apart) {
  OpRegistry registry;
  registry.add(doubled_def());
  OpDef earlier = doubled_def();
  earlier.since = 2;
  earlier.until = 4;
  registry.add(earlier);
  EXPECT_TRUE(registry.all().empty());
  ASSERT_EQ(registry.composites().size(), 1u);
  EXPECT_EQ(registry.composites()[0]->since, 5);
  EXPECT_EQ(registry.at("", "Doubled", 9).since, 5);
  EXPECT_EQ(registry.at("", "Doubled", 5).since, 5);
  EXPECT_EQ(registry.at("", "Doubled", 4).since, 2);
  EXPECT_THROW(registry.at("", "Doubled", 1), UnsupportedError);
  EXPECT_THROW(registry.at("", "Tripled", 1), UnsupportedError);
  EXPECT_THROW(registry.add(doubled_def()), InternalError);
  EXPECT_THROW(registry.set_gradient("", "Doubled", [](GradContext&) {}, false), InvalidModelError);

  OpDef neither = doubled_def();
  neither.name = "Neither";
  neither.expand = nullptr;
  EXPECT_THROW(registry.add(neither), InternalError);
  OpDef both = doubled_def();
  both.name = "Both";
  both.infer = infer_same_as_input;
  EXPECT_NO_THROW(registry.add(both)) << "it may stand in graphs that are made for files";
}

TEST(Expand, optimizers_have_as_many_results_as_their_tensors_give) {
  const auto adam = [](const char* inputs, const char* outputs) {
    return parse_graph(
        str("graph (float32 r, int64 t, float32[2] x, float32[2] g, float32[2] v, float32[2] h) => "
            "(a) {",
            outputs, " = ai.onnx.preview.training::Adam (r, t", inputs, ") }"));
  };
  adam(", x, g, v, h", "a, b, c");
  adam(", x, g, v, h", "a");
  EXPECT_THROW(adam(", x, g, v, h", "a, b, c, d"), InvalidModelError);
  EXPECT_THROW(adam(", x, g, v", "a"), InvalidModelError);
  EXPECT_THROW(adam("", "a"), InvalidModelError);
}

}  // namespace
}  // namespace ortrain
