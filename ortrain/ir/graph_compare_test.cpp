// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/graph_compare.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "ortrain/ir/sample_registry_test.h"
#include "ortrain/ir/text.h"

namespace ortrain {
namespace {

using ::testing::HasSubstr;

Graph parse(std::string_view text) { return parse_graph(text, sample_registry()); }

Graph sample() {
  return parse(R"(graph g (float32[b, 4] x, float32[4] w [parameter fc.w grad], float32[4] v)
      => (y, h [buffer_update w]) {
    const c = float32[4] {1, 2, 3, 4}
    const k = float32[4] {1, 2, 3, 5}
    h = Add(w, c) @a/Add
    p, m = Dropout(x)
    y = Softmax <axis = 1> (p)
    u = Add(v, k)
  })");
}

std::string difference_after(const std::function<void(Graph&)>& change) {
  Graph graph = sample();
  change(graph);
  return first_difference(sample(), graph);
}

TEST(graph_compare, equal_graphs) {
  EXPECT_EQ(first_difference(sample(), sample()), "");
  EXPECT_EQ(first_difference(Graph(), Graph()), "");
}

TEST(graph_compare, ids_and_unread_constants_play_no_part) {
  Graph graph = sample();
  graph.add_constant(TensorData::scalar(DType::f32, 1), "unread");
  EXPECT_EQ(first_difference(sample(), graph), "");
  EXPECT_EQ(first_difference(graph, sample()), "");
}

TEST(graph_compare, every_part_counts) {
  const auto node = [](Graph& g, size_t i) -> Node& { return g.node(g.order()[i]); };
  EXPECT_THAT(difference_after([](Graph& g) { g.name = "other"; }), HasSubstr("graph name"));
  EXPECT_THAT(difference_after([](Graph& g) { g.inputs().pop_back(); }), HasSubstr("inputs"));
  EXPECT_THAT(difference_after([](Graph& g) { g.inputs()[0].role = InputRole::seed; }),
              HasSubstr("roles"));
  EXPECT_THAT(difference_after([](Graph& g) { g.inputs()[1].target = "q"; }), HasSubstr("target"));
  EXPECT_THAT(difference_after([](Graph& g) { g.inputs()[1].requires_grad = false; }),
              HasSubstr("requires_grad"));
  EXPECT_THAT(difference_after([](Graph& g) { g.rename_value(g.inputs()[0].value, "q"); }),
              HasSubstr("input 0 name"));
  EXPECT_THAT(difference_after([](Graph& g) { g.value(0).dtype = DType::f64; }),
              HasSubstr("input 0 type"));
  EXPECT_THAT(difference_after([](Graph& g) { g.value(0).shape[1] = Dim(5); }),
              HasSubstr("input 0 shape"));
  EXPECT_THAT(difference_after([&](Graph& g) { node(g, 2).op = "LeakyRelu"; }),
              HasSubstr("LeakyRelu"));
  EXPECT_THAT(difference_after([&](Graph& g) { node(g, 2).domain = "ortrain"; }),
              HasSubstr("ortrain::"));
  EXPECT_THAT(difference_after([&](Graph& g) { node(g, 0).name = "b/Add"; }), HasSubstr("b/Add"));
  EXPECT_THAT(difference_after([&](Graph& g) { node(g, 0).phase = Phase::backward; }),
              HasSubstr("phases"));
  EXPECT_THAT(difference_after([&](Graph& g) { node(g, 2).attributes["axis"] = int64_t{0}; }),
              HasSubstr("attributes"));
  EXPECT_THAT(difference_after([&](Graph& g) { node(g, 0).inputs[0] = g.inputs()[2].value; }),
              HasSubstr("input 0"));
  EXPECT_THAT(difference_after([&](Graph& g) { node(g, 0).inputs[1] = g.find_value("k"); }),
              HasSubstr("input 1"));
  EXPECT_THAT(difference_after([&](Graph& g) { node(g, 0).inputs.pop_back(); }),
              HasSubstr("numbers of inputs"));
  EXPECT_THAT(difference_after([&](Graph& g) { node(g, 1).outputs[1] = kNoValue; }),
              HasSubstr("output 1 is absent"));
  EXPECT_THAT(difference_after([&](Graph& g) { node(g, 1).inputs.push_back(kNoValue); }),
              HasSubstr("numbers of inputs"));
  EXPECT_THAT(difference_after([&](Graph& g) { g.remove_node(g.order()[3]); }),
              HasSubstr("number of nodes"));
  EXPECT_THAT(difference_after([](Graph& g) { g.outputs()[0].value = g.find_value("p"); }),
              HasSubstr("output 0"));
  EXPECT_THAT(difference_after([](Graph& g) { g.outputs()[0].name = "q"; }),
              HasSubstr("output 0 name"));
  EXPECT_THAT(difference_after([](Graph& g) { g.outputs()[1].target = "q"; }),
              HasSubstr("output 1 target"));
  EXPECT_THAT(difference_after([](Graph& g) { g.outputs()[1].role = OutputRole::user; }),
              HasSubstr("roles"));
  EXPECT_THAT(difference_after([](Graph& g) { g.outputs().pop_back(); }), HasSubstr("outputs"));
}

TEST(graph_compare, contents_of_constants_count) {
  const auto with = [](const char* elements) {
    return parse(std::string("graph () => (y) { const c = float32[2] ") + elements +
                 "\n y = Identity(c) }");
  };
  EXPECT_THAT(first_difference(with("{1, 2}"), with("{1, 3}")), HasSubstr("constants"));
  EXPECT_EQ(first_difference(with("{1, nan}"), with("{1, nan}")), "");
}

TEST(graph_compare, names_can_be_left_out) {
  const Graph a =
      parse("graph a (float32 x) => (y) { h = Add(x, float32 1) @p\n y = Identity(h) }");
  const Graph b =
      parse("graph b (float32 x) => (y) { const k = float32 1\n q = Add(x, k)\n y = Identity(q) }");
  EXPECT_NE(first_difference(a, b), "");
  EXPECT_EQ(first_difference(a, b, {.names = false}), "");
  const Graph c = parse("graph (float32 x) => (y) { q = Add(x, float32 2)\n y = Identity(q) }");
  EXPECT_NE(first_difference(a, c, {.names = false}), "");
}

TEST(graph_compare, extents) {
  const std::set<std::string> free_symbols{"b", "s"};
  const Dim b = Dim::symbol("b");
  const Dim s = Dim::symbol("s");
  const Dim unknown = Dim::symbol("unknown(NonZero#3.1)");
  EXPECT_TRUE(extents_agree(b * s, s * b, free_symbols));
  EXPECT_FALSE(extents_agree(b, s, free_symbols));
  EXPECT_FALSE(extents_agree(b, b + Dim(1), free_symbols));
  EXPECT_FALSE(extents_agree(b, Dim(4), free_symbols));
  EXPECT_TRUE(extents_agree(unknown, Dim(4), free_symbols));
  EXPECT_TRUE(extents_agree(unknown, b, free_symbols));
  EXPECT_FALSE(extents_agree(unknown, unknown + Dim(1), free_symbols));
  EXPECT_FALSE(shapes_agree({b}, {b, b}, free_symbols));
}

TEST(graph_compare, float_attributes_are_compared_by_their_bits) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(operator_equal(Attribute{nan}, Attribute{nan}));
  EXPECT_FALSE(operator_equal(Attribute{0.0}, Attribute{-0.0}));
  EXPECT_TRUE(operator_equal(Attribute{std::vector<double>{nan, 1}},
                             Attribute{std::vector<double>{nan, 1}}));
  EXPECT_FALSE(
      operator_equal(Attribute{std::vector<double>{1}}, Attribute{std::vector<double>{1, 1}}));
}

}  // namespace
}  // namespace ortrain
