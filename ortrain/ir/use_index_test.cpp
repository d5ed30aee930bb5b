// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/use_index.h"

#include <gtest/gtest.h>

#include <random>

#include "ortrain/base/error.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/ir/text.h"

namespace ortrain {
namespace {

// Random replacements, new nodes and other inputs, with the index and without.
TEST(UseIndex, ReplacesWhatWalkingAllNodesReplaces) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](size_t n) { return random() % n; };
    Graph walked = parse_graph(
        "graph g (float32[4] x, float32[4] y) => (a, b) {\n  a = Add(x, y)\n"
        "  b = Mul(a, x)\n}");
    Graph indexed = walked;
    UseIndex index(indexed);
    for (int step = 0; step < 60; ++step) {
      const auto a = static_cast<ValueId>(below(walked.num_values()));
      const auto b = static_cast<ValueId>(below(walked.num_values()));
      switch (below(3)) {
        case 0:
          walked.replace_uses(a, b);
          index.replace_uses(a, b);
          break;
        case 1:
          for (Graph* graph : {&walked, &indexed}) GraphBuilder(*graph).op("Add", {a, b});
          break;
        default: {
          const auto node = static_cast<NodeId>(below(walked.num_node_slots()));
          for (Graph* graph : {&walked, &indexed}) graph->node(node).inputs[0] = a;
          index.note_reads(node);
        }
      }
      for (size_t n = 0; n < walked.num_node_slots(); ++n) {
        const auto id = static_cast<NodeId>(n);
        ASSERT_EQ(walked.node(id).inputs, indexed.node(id).inputs) << seed << ", step " << step;
      }
      for (size_t k = 0; k < walked.outputs().size(); ++k) {
        ASSERT_EQ(walked.outputs()[k].value, indexed.outputs()[k].value);
      }
    }
  }
}

TEST(UseIndex, WhatIsAbsentHasNoUses) {
  Graph graph = parse_graph("graph g (float32[4] x) => (y) {\n  y = Neg(x)\n}");
  EXPECT_THROW(UseIndex(graph).replace_uses(kNoValue, 0), InternalError);
}

}  // namespace
}  // namespace ortrain
