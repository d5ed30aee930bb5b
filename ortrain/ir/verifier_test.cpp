// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/verifier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ortrain/base/error.h"
#include "ortrain/ir/sample_registry_test.h"
#include "ortrain/ir/text.h"

namespace ortrain {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Graph sample() {
  return parse_graph(R"(graph (float32[b, 4] x, float32[4] w [parameter w grad],
                                float32[b, 4] dy [gradient y]) => (y, dx as dx [gradient x]) {
    const c = float32[4] {1, ...}
    h = Add(x, w) @fc/Add
    k = Add(h, c) @fc/AddC
    y = Softmax(k) @act/Softmax
    s = Shape(y)
  backward:
    dx = Add(dy, y) @act/Add
  })",
                     sample_registry());
}

std::string broken(const Graph& graph) {
  try {
    verify(graph, sample_registry());
  } catch (const InvalidModelError& error) {
    return error.what();
  }
  ADD_FAILURE() << "accepted:\n" << print_graph(graph);
  return "";
}

NodeId node_named(const Graph& graph, std::string_view name) {
  for (NodeId id : graph.order()) {
    if (graph.node(id).name == name) return id;
  }
  ADD_FAILURE() << "no node " << name;
  return kNoNode;
}

TEST(verifier, accepts_sound_graphs) {
  verify(sample(), sample_registry());
  verify(Graph(), sample_registry());
}

TEST(verifier, accepts_extents_that_only_the_data_tell) {
  Graph graph = parse_graph("graph (float32[b] x) => (z) { y = NonZero(x)\n z = Identity(y) }",
                            sample_registry());
  graph.value(graph.find_value("y")).shape[1] = Dim::symbol("found");
  verify(graph, sample_registry());
}

TEST(verifier, accepts_removed_nodes) {
  Graph graph = sample();
  graph.outputs().erase(graph.outputs().begin() + 1);
  EXPECT_GT(graph.remove_dead_nodes(), 0);
  verify(graph, sample_registry());
}

TEST(verifier, ids) {
  Graph graph = sample();
  graph.node(node_named(graph, "fc/Add")).inputs[1] = 99;
  EXPECT_THAT(broken(graph), AllOf(HasSubstr("[Add 'fc/Add']"), HasSubstr("'ids'")));
  graph = sample();
  graph.outputs()[0].value = kNoValue;
  EXPECT_THAT(broken(graph), AllOf(HasSubstr("output 'y'"), HasSubstr("'ids'")));
  graph = sample();
  graph.inputs()[0].value = 99;
  EXPECT_THAT(broken(graph), HasSubstr("'ids'"));
  graph = sample();
  graph.inputs().erase(graph.inputs().begin());
  EXPECT_THAT(broken(graph), AllOf(HasSubstr("[Add 'fc/Add']"), HasSubstr("no input")));
}

TEST(verifier, names) {
  Graph graph = sample();
  graph.value(graph.find_value("h")).name = "x";
  EXPECT_THAT(broken(graph), AllOf(HasSubstr("'names'"), HasSubstr("'x'")));
  graph = sample();
  graph.value(graph.find_value("h")).name = "";
  EXPECT_THAT(broken(graph), HasSubstr("'names'"));
}

TEST(verifier, single_assignment) {
  Graph graph = sample();
  graph.node(node_named(graph, "act/Softmax")).outputs[0] = graph.find_value("h");
  EXPECT_THAT(broken(graph),
              AllOf(HasSubstr("[Softmax 'act/Softmax']"), HasSubstr("'single assignment'")));
  graph = sample();
  graph.inputs().push_back(graph.inputs()[0]);
  EXPECT_THAT(broken(graph), HasSubstr("'single assignment'"));
  graph = sample();
  graph.inputs()[0].value = graph.find_value("h");
  EXPECT_THAT(broken(graph), HasSubstr("'single assignment'"));
}

TEST(verifier, order) {
  Graph graph = sample();
  graph.node(node_named(graph, "fc/Add")).inputs[0] = graph.find_value("y");
  EXPECT_THAT(broken(graph), AllOf(HasSubstr("[Add 'fc/Add']"), HasSubstr("'order'")));
}

TEST(verifier, dead_reference) {
  Graph graph = sample();
  graph.remove_node(node_named(graph, "fc/AddC"));
  EXPECT_THAT(broken(graph), AllOf(HasSubstr("[Softmax 'act/Softmax']"),
                                   HasSubstr("'dead reference'"), HasSubstr("'k'")));
  graph = sample();
  graph.remove_node(node_named(graph, "act/Add"));
  EXPECT_THAT(broken(graph), AllOf(HasSubstr("output 'dx'"), HasSubstr("'dead reference'")));
}

TEST(verifier, inference) {
  Graph graph = sample();
  graph.value(graph.find_value("h")).dtype = DType::f64;
  EXPECT_THAT(broken(graph), AllOf(HasSubstr("[Add 'fc/Add']"), HasSubstr("'inference'"),
                                   HasSubstr("float64[b, 4], inferred is float32[b, 4]")));
  graph = sample();
  graph.value(graph.find_value("y")).shape[0] = Dim::symbol("b") + Dim(1);
  EXPECT_THAT(broken(graph), AllOf(HasSubstr("Softmax"), HasSubstr("'inference'")));
  graph = sample();
  graph.value(graph.find_value("y")).shape.pop_back();
  EXPECT_THAT(broken(graph), AllOf(HasSubstr("Softmax"), HasSubstr("'inference'")));
  graph = sample();
  graph.value(graph.find_value("s")).known = std::vector<Dim>{Dim::symbol("b"), Dim(5)};
  EXPECT_THAT(broken(graph), AllOf(HasSubstr("[Shape]"), HasSubstr("'inference'")));
  graph = sample();
  graph.node(node_named(graph, "act/Softmax")).attributes["axis"] = 1.0;
  EXPECT_THAT(broken(graph), AllOf(HasSubstr("'inference'"), HasSubstr("'axis'")));
  graph = sample();
  graph.node(node_named(graph, "act/Softmax")).op = "NoSuchOp";
  EXPECT_THAT(broken(graph), HasSubstr("NoSuchOp"));
  graph = sample();
  graph.value(graph.find_value("c")).dtype = DType::i32;
  EXPECT_THAT(broken(graph), AllOf(HasSubstr("'c'"), HasSubstr("'inference'")));
}

TEST(verifier, symbols_of_the_inputs_are_not_interchangeable) {
  Graph graph =
      parse_graph("graph (float32[b, s] x) => (y) { y = Identity(x) }", sample_registry());
  graph.value(graph.find_value("y")).shape = {Dim::symbol("s"), Dim::symbol("b")};
  EXPECT_THAT(broken(graph), HasSubstr("'inference'"));
}

TEST(verifier, phase) {
  Graph graph = sample();
  graph.node(node_named(graph, "act/Add")).phase = Phase::forward;
  EXPECT_THAT(broken(graph),
              AllOf(HasSubstr("[Add 'act/Add']"), HasSubstr("'phase'"), HasSubstr("'dy'")));
  graph = sample();
  graph.node(node_named(graph, "fc/Add")).phase = Phase::backward;
  EXPECT_THAT(broken(graph), AllOf(HasSubstr("[Add 'fc/AddC']"), HasSubstr("'phase'")));
  graph = sample();
  graph.outputs()[1].role = OutputRole::user;
  EXPECT_THAT(broken(graph), AllOf(HasSubstr("output 'dx'"), HasSubstr("'phase'")));
}

// Two inputs of one target lie in one place: a step that writes to the one would change the other
// under whoever reads it.
TEST(Verifier, TargetsStandOnce) {
  const auto refusal = [](const char* text) -> std::string {
    try {
      verify(parse_graph(text));
    } catch (const InvalidModelError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(refusal(R"(
graph g (int64[4] data, int64[4] i [buffer "b"], int64[4] j [buffer "b"]) => (n [buffer_update "b"]) {
  n = ScatterElements(data, i, data)
}
)"),
              HasSubstr("two inputs are 'b'"));
  EXPECT_THAT(refusal(R"(
graph g (float32[4] x, float32[4] b [buffer "b"]) => (m [buffer_update "b"], n [buffer_update "b"]) {
  m = Add(x, b)
  n = Mul(x, b)
}
)"),
              HasSubstr("two outputs update 'b'"));
  // A parameter and a state of the optimizer have names of their own.
  EXPECT_EQ(refusal("graph g (float32[4] w [parameter \"w\"], float32[4] s [state \"w\"]) => (y) {\n"
                    "  y = Add(w, s)\n}"),
            "");
}

}  // namespace
}  // namespace ortrain
