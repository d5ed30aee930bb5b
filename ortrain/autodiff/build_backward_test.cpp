// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/autodiff/build_backward.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ortrain/base/error.h"
#include "ortrain/ir/text.h"

namespace ortrain {
namespace {

using ::testing::HasSubstr;

constexpr char kTwoRoots[] = R"(
graph g (float32[3] v [parameter "v" grad], float32[3] w [parameter "w" grad],
         float32[3] first, float32[3] second) => (x, y) {
  x = Neg(v)
  y = Neg(w)
}
)";

TEST(BuildBackward, TakesEachRootsGradientFromItsPlace) {
  Graph graph = parse_graph(kTwoRoots);
  const ValueId first = graph.inputs()[2].value;
  const ValueId second = graph.inputs()[3].value;
  build_backward(graph, {.output_indices = {0, 1}, .gradients = {first, second}});
  graph.remove_dead_nodes();
  const std::string text = print_graph(graph);
  size_t checked = 0;
  for (const GraphOutput& output : graph.outputs()) {
    if (output.role == OutputRole::user) continue;
    const std::string from = output.target == "v" ? "Neg (first)" : "Neg (second)";
    EXPECT_THAT(text, HasSubstr(graph.value(output.value).name + " = " + from)) << output.target;
    ++checked;
  }
  EXPECT_EQ(checked, 2u) << text;
}

TEST(BuildBackward, RefusesAnotherNumberOfGradients) {
  Graph graph = parse_graph(kTwoRoots);
  const ValueId first = graph.inputs()[2].value;
  EXPECT_THROW(build_backward(graph, {.output_indices = {0, 1}, .gradients = {first}}), Error);
}

TEST(GradientPaths, LeadThroughOperatorsThatPassGradientsOn) {
  const Graph graph = parse_graph(R"(
graph g (float32[3] v [parameter "v" grad], float32[3] w [parameter "w" grad],
         float32[3] frozen [parameter "frozen"]) => (x, y, z, n) {
  k = Cast<to = 7>(v)
  r = Cast<to = 1>(k)
  x = Mul(r, w)
  y = Add(v, frozen)
  n = Shape(w)
  z = ConstantOfShape(n)
}
)");
  using Names = std::vector<std::string>;
  EXPECT_EQ(gradient_paths(graph), (std::vector<Names>{{"w"}, {"v"}, {}, {}}));
  EXPECT_EQ(value_paths(graph), (std::vector<Names>{{"v", "w"}, {"v"}, {}, {}}));
}

}  // namespace
}  // namespace ortrain
