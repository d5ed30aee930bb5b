// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/fuse_classifier_loss.h"

#include <gtest/gtest.h>

#include "ortrain/ir/text.h"
#include "ortrain/ir/verifier.h"
#include "ortrain/passes/pass_notes.h"

namespace ortrain {
namespace {

// `middle` makes d2, the gradient of the logits that the products read; `end` may add nodes.
std::string classifier(const std::string& middle, const std::string& outputs = "dx, dw, db",
                       const std::string& end = "") {
  return "graph classifier (float32[] dloss, float32[r, 9] logits, int64[r] labels,\n"
         "    float32[r] lse, float32[r, 4] x, float32[9, 4] w, float32[9, 4] base) => (" +
         outputs + ") {\n" +
         "  const rows = int64[1] {0}\n"
         "  d = ortrain::CrossEntropyGrad <reduction = \"mean\"> (dloss, logits, labels, lse)\n" +
         middle +
         "  dx = ortrain::LinearInputGrad (d2, w)\n"
         "  dw = ortrain::LinearWeightGrad (d2, x, base)\n"
         "  db = ReduceSum <keepdims = 0> (d2, rows)\n" +
         end + "}";
}

int count(const Graph& graph, std::string_view op) {
  int found = 0;
  for (NodeId id : graph.order()) found += graph.node(id).op == op;
  return found;
}

bool fuse(Graph& graph) {
  const bool changed = fuse_classifier_loss().run(graph);
  graph.sort();
  graph.remove_dead_nodes();
  verify(graph);
  return changed;
}

TEST(FuseClassifierLoss, JoinsTheThreeProducts) {
  const std::string same = "  const flat = int64[2] {-1, 9}\n  d2 = Reshape (d, flat)\n";
  for (const std::string& outputs : {std::string("dx, dw, db"), std::string("dx, dw")}) {
    Graph graph = parse_graph(classifier(same, outputs));
    graph.remove_dead_nodes();
    const PassNotes notes;
    EXPECT_TRUE(fuse(graph));
    ASSERT_EQ(notes.all().size(), 1U);
    EXPECT_EQ(graph.node(notes.all()[0].result).op, "ClassifierLossGrad");
    EXPECT_EQ(notes.all()[0].nodes.size(), outputs == "dx, dw" ? 3U : 4U);
    EXPECT_EQ(count(graph, "ClassifierLossGrad"), 1);
    EXPECT_EQ(graph.order().size(), 1U) << print_graph(graph);
  }
}

TEST(FuseClassifierLoss, LeavesGradientsThatOthersRead) {
  const std::string same = "  const flat = int64[2] {-1, 9}\n  d2 = Reshape (d, flat)\n";
  for (const std::string& outputs : {std::string("dx, dw, db, d"), std::string("dx, dw, db, d2")}) {
    Graph graph = parse_graph(classifier(same, outputs));
    const PassNotes notes;
    EXPECT_FALSE(fuse(graph));
    ASSERT_EQ(notes.all().size(), 1U);
    EXPECT_EQ(notes.all()[0].reason,
              "the gradient of the logits is read by others than one linear layer");
  }
  Graph scaled = parse_graph(classifier("  const two = float32[] {2}\n  d2 = Mul (d, two)\n"));
  EXPECT_FALSE(fuse(scaled));
  Graph other = parse_graph(classifier(same, "dx, dw, db, e", "  e = Exp (d)\n"));
  EXPECT_FALSE(fuse(other));
  Graph twice =
      parse_graph(classifier(same, "dx, dw, db, e", "  e = ortrain::LinearInputGrad (d2, base)\n"));
  EXPECT_FALSE(fuse(twice));
  Graph frozen = parse_graph(classifier(same, "dx"));
  frozen.remove_dead_nodes();
  EXPECT_FALSE(fuse(frozen)) << "nothing to share";
}

TEST(FuseClassifierLoss, LooksThroughAnyNumberOfReshapes) {
  constexpr int kMany = 100000;
  std::string chain = "  const flat = int64[2] {-1, 9}\n  r0 = Reshape (d, flat)\n";
  for (int i = 1; i < kMany; ++i) {
    chain += "  r" + std::to_string(i) + " = Reshape (r" + std::to_string(i - 1) + ", flat)\n";
  }
  chain += "  d2 = Reshape (r" + std::to_string(kMany - 1) + ", flat)\n";
  Graph graph = parse_graph(classifier(chain));
  EXPECT_TRUE(fuse_classifier_loss().run(graph));
}

}  // namespace
}  // namespace ortrain
