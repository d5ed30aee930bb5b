// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/remove_padding.h"

#include <gtest/gtest.h>

#include "ortrain/ir/text.h"
#include "ortrain/ir/verifier.h"

namespace ortrain {
namespace {

// A layer with attention over x[b, s, 8]; `end` makes y from r, what the layer gives.
std::string layer(const std::string& end, const std::string& inputs = "") {
  return R"(graph layer (float32[b, s, 8] x [user], bool[b, 1, s, s] see [user],
       float32[8, 8] w [parameter w grad], float32[8] g [parameter g grad])" +
         inputs + R"() => (y) {
  const zero = int64[] {0}
  const last = int64[] {-1}
  q = ortrain::Linear (x, w)
  a = ortrain::Attention <q_num_heads = 2> (q, q, x, see)
  h = Add (a, x)
  n = LayerNormalization (h, g)
  r = Tanh (n)
)" + end +
         "\n}";
}

Graph parse(const std::string& text) {
  Graph graph = parse_graph(text);
  verify(graph);
  return graph;
}

int count(const Graph& graph, std::string_view op) {
  int found = 0;
  for (NodeId id : graph.order()) found += graph.node(id).op == op;
  return found;
}

TEST(RemovePadding, PacksLayersBehindWhichOneRowIsRead) {
  const Graph graph = parse(layer("  y = Gather <axis = 1> (r, zero)"));
  auto found = remove_padding(graph, false);
  ASSERT_TRUE(found);
  verify(found->packed);
  EXPECT_EQ(found->picked, std::vector<int64_t>{0});
  EXPECT_EQ(found->packed.inputs().size(), graph.inputs().size() + 5);
  EXPECT_EQ(found->masks.inputs().size(), 1U);
  EXPECT_EQ(found->mask_inputs, std::vector<size_t>{1});
  EXPECT_EQ(found->batch.axis, 0U);
  EXPECT_EQ(found->length.axis, 1U);
  for (NodeId id : found->packed.order()) {
    const Node& node = found->packed.node(id);
    if (node.op != "Linear" && node.op != "Tanh" && node.op != "Attention") continue;
    const Shape& shape = found->packed.value(node.outputs[0]).shape;
    EXPECT_EQ(shape, (Shape{1, Dim::symbol("packed_rows"), 8})) << node.op;
  }
}

TEST(RemovePadding, CausalMasksBecomeAnAttribute) {
  const Graph graph = parse(layer("  y = Gather <axis = 1> (r, zero)"));
  auto found = remove_padding(graph, true);
  ASSERT_TRUE(found);
  for (NodeId id : found->packed.order()) {
    const Node& node = found->packed.node(id);
    if (node.op == "Attention") {
      EXPECT_EQ(std::get<int64_t>(node.attributes.at("is_causal")), 1);
    }
  }
}

TEST(RemovePadding, LeavesLayersWhoseRowsAreSeen) {
  EXPECT_FALSE(remove_padding(parse(layer("  y = Identity (r)")), false)) << "an output";
  EXPECT_FALSE(remove_padding(parse(layer("  y = Gather <axis = 1> (r, last)")), false))
      << "a position that depends on the length";
  EXPECT_FALSE(remove_padding(parse(layer("  const one = int64[1] {1}\n"
                                          "  y = ReduceMean <keepdims = 0> (r, one)")),
                              false))
      << "a mean over positions";
}

TEST(RemovePadding, LeavesMasksThatAreLearned) {
  const Graph graph = parse(R"(graph biased (float32[b, s, 8] x [user],
       float32[1, 1, s, s] bias [parameter bias grad]) => (y) {
  const zero = int64[] {0}
  a = ortrain::Attention <q_num_heads = 2> (x, x, x, bias)
  y = Gather <axis = 1> (a, zero)
})");
  EXPECT_FALSE(remove_padding(graph, false));
}

TEST(RemovePadding, LeavesExtentsThatAreNumbers) {
  const Graph graph = parse(R"(graph still (float32[2, 4, 8] x [user],
       bool[2, 1, 4, 4] see [user]) => (y) {
  const zero = int64[] {0}
  a = ortrain::Attention <q_num_heads = 2> (x, x, x, see)
  y = Gather <axis = 1> (a, zero)
})");
  EXPECT_FALSE(remove_padding(graph, false));
}

TEST(RemovePadding, OperandsPerPositionAndPerSequenceAreGathered) {
  const Graph graph =
      parse(layer("  moved = Add (r, p)\n  scaled = Mul (moved, c)\n"
                  "  y = Gather <axis = 1> (scaled, zero)",
                  ", float32[1, s, 8] p [user], float32[b, 1, 8] c [user]"));
  auto found = remove_padding(graph, false);
  ASSERT_TRUE(found);
  verify(found->packed);
  EXPECT_EQ(count(found->packed, "Gather"), 4);  // x, p, c, the row that is read
}

TEST(RemovePadding, RowsOfMergedValues) {
  const Graph graph =
      parse(layer("  const flat = int64[2] {-1, 8}\n  m = Reshape (r, flat)\n"
                  "  k = Gemm (m, w)\n  back = Shape (x)\n  u = Reshape (k, back)\n"
                  "  y = Gather <axis = 1> (u, zero)"));
  auto found = remove_padding(graph, false);
  ASSERT_TRUE(found);
  verify(found->packed);
  EXPECT_EQ(count(found->packed, "Gemm"), 1);
}

}  // namespace
}  // namespace ortrain
