// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/pass_notes.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "ortrain/base/error.h"
#include "ortrain/ir/text.h"
#include "ortrain/passes/pipeline.h"

namespace ortrain {
namespace {

constexpr const char* kTwoGroups =
    "graph g (float32[8, 16] x, float32[16, 16] w) => (y) {\n"
    "  a = Tanh(x)\n  b = Exp(a)\n  m = MatMul(b, w)\n  c = Neg(m)\n  y = Tanh(c)\n}";

std::vector<PassNote> notes_of(Graph& graph) {
  PassNotes notes;
  run_pipeline(graph, "fuse");
  return notes.all();
}

std::vector<std::string> ops_of(const PassNote& note) {
  std::vector<std::string> ops;
  for (const NotedNode& node : note.nodes) ops.push_back(node.op);
  return ops;
}

// "Maker>Reader: reason" of what was refused.
std::vector<std::string> refusals(const std::vector<PassNote>& notes) {
  std::vector<std::string> lines;
  for (const PassNote& note : notes) {
    if (note.taken) continue;
    std::string line;
    for (const NotedNode& node : note.nodes) line += (line.empty() ? "" : ">") + node.op;
    lines.push_back(line + ": " + note.reason);
  }
  std::ranges::sort(lines);
  return lines;
}

TEST(PassNotes, TellWhatBecameOneNode) {
  Graph graph = parse_graph(kTwoGroups);
  const std::vector<PassNote> notes = notes_of(graph);
  std::vector<PassNote> taken;
  std::ranges::copy_if(notes, std::back_inserter(taken), &PassNote::taken);
  ASSERT_EQ(taken.size(), 2u);
  EXPECT_EQ(taken[0].pass, "fuse_elementwise");
  EXPECT_EQ(ops_of(taken[0]), (std::vector<std::string>{"Tanh", "Exp"}));
  EXPECT_EQ(ops_of(taken[1]), (std::vector<std::string>{"Neg", "Tanh"}));
  for (const PassNote& note : taken) EXPECT_EQ(graph.node(note.result).op, "Fused");
}

TEST(PassNotes, TellWhatKeepsNodesApart) {
  Graph graph = parse_graph(kTwoGroups);
  EXPECT_EQ(refusals(notes_of(graph)),
            (std::vector<std::string>{"Exp>MatMul: MatMul has matrix products",
                                      "MatMul>Neg: MatMul has matrix products"}));
}

TEST(PassNotes, TellOfShapesAndOtherAxes) {
  Graph graph = parse_graph(
      "graph g (float32[8, 16] x, float32[4, 8, 16] z) => (y, r) {\n"
      "  a = Tanh(x)\n  y = Add(a, z)\n  axes = Constant <value_ints = [0]> ()\n"
      "  b = Exp(z)\n  r = ReduceSum(b, axes)\n}");
  EXPECT_EQ(refusals(notes_of(graph)),
            (std::vector<std::string>{"Exp>ReduceSum: ReduceSum reduces other axes than the last",
                                      "Tanh>Add: their shapes differ"}));
}

TEST(PassNotes, TellWhyReductionsStandAlone) {
  const auto reason = [](const std::string& shape, const std::string& axis,
                         const std::string& keepdims) {
    Graph graph = parse_graph(
        "graph g (float32[" + shape + "] x) => (r) {\n  const axes = int64[1] {" + axis +
        "}\n  a = Exp(x)\n  r = ReduceSum <keepdims = " + keepdims + "> (a, axes)\n}");
    const std::vector<std::string> lines = refusals(notes_of(graph));
    return lines.size() == 1 ? lines[0] : str(lines.size(), " notes");
  };
  EXPECT_EQ(reason("8, 16", "0", "1"), "Exp>ReduceSum: ReduceSum reduces other axes than the last");
  EXPECT_EQ(reason("8, 16", "1", "0"), "Exp>ReduceSum: ReduceSum drops the axis that it reduces");
  EXPECT_EQ(reason("16", "0", "1"), "Exp>ReduceSum: ReduceSum reduces a single row");
  EXPECT_EQ(reason("8, 100000", "1", "1"), "Exp>ReduceSum: ReduceSum reduces very long rows");
  EXPECT_EQ(reason("8, 16", "1", "1"), "0 notes");
}

TEST(PassNotes, TellOfPathsThroughOthers) {
  Graph graph = parse_graph(
      "graph g (float32[8, 8] x) => (y) {\n"
      "  a = Tanh(x)\n  m = MatMul(a, a)\n  y = Add(a, m)\n}");
  const std::vector<std::string> lines = refusals(notes_of(graph));
  EXPECT_NE(std::ranges::find(lines, "Tanh>Add: a path between them leads through another node"),
            lines.end());
}

TEST(PassNotes, AreNotMadeWhereNobodyListens) {
  EXPECT_EQ(PassNotes::current(), nullptr);
  Graph graph = parse_graph(kTwoGroups);
  run_pipeline(graph, "fuse");
  Graph noted = parse_graph(kTwoGroups);
  notes_of(noted);
  EXPECT_EQ(print_graph(graph), print_graph(noted));
  EXPECT_EQ(PassNotes::current(), nullptr);
}

TEST(PassNotes, GoToTheInnermostListener) {
  PassNotes outer;
  {
    Graph graph = parse_graph(kTwoGroups);
    EXPECT_FALSE(notes_of(graph).empty());
  }
  EXPECT_EQ(PassNotes::current(), &outer);
  EXPECT_TRUE(outer.all().empty());
}

}  // namespace
}  // namespace ortrain
