// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/min_cut.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

struct Edge {
  size_t from, to;
  int64_t capacity;
};

int64_t cost_of(const std::vector<Edge>& edges, const std::vector<bool>& at_source) {
  int64_t cost = 0;
  for (const Edge& edge : edges) {
    if (at_source[edge.from] && !at_source[edge.to]) cost += edge.capacity;
  }
  return cost;
}

TEST(MinCut, CutsTheNarrowEdgeOfAPath) {
  MinCut cut(4);
  cut.add_edge(MinCut::kSource, 2, 5);
  cut.add_edge(2, 3, 2);
  cut.add_edge(3, MinCut::kSink, 7);
  EXPECT_EQ(cut.solve(), 2);
  EXPECT_TRUE(cut.is_at_source(2));
  EXPECT_FALSE(cut.is_at_source(3));
}

TEST(MinCut, EqualCutsLeaveFewAtTheSource) {
  MinCut cut(3);
  cut.add_edge(MinCut::kSource, 2, 3);
  cut.add_edge(2, MinCut::kSink, 3);
  EXPECT_EQ(cut.solve(), 3);
  EXPECT_FALSE(cut.is_at_source(2));
}

TEST(MinCut, AgreesWithAllCutsOfRandomGraphs) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    const size_t size = 3 + random() % 7;
    std::vector<Edge> edges;
    for (size_t i = 0; i < 3 * size; ++i) {
      edges.push_back({random() % size, random() % size, static_cast<int64_t>(random() % 20)});
    }
    MinCut cut(size);
    for (const Edge& edge : edges) cut.add_edge(edge.from, edge.to, edge.capacity);
    int64_t least = MinCut::kInfinite;
    for (size_t set = 0; set < (size_t{1} << (size - 2)); ++set) {
      std::vector<bool> at_source{true, false};
      for (size_t v = 2; v < size; ++v) at_source.push_back((set >> (v - 2)) & 1);
      least = std::min(least, cost_of(edges, at_source));
    }
    EXPECT_EQ(cut.solve(), least);
    std::vector<bool> found;
    for (size_t v = 0; v < size; ++v) found.push_back(cut.is_at_source(v));
    EXPECT_EQ(cost_of(edges, found), least);
  }
}

TEST(MinCut, LongPathsNeedNoStack) {
  constexpr size_t kLength = 200000;
  MinCut cut(kLength);
  size_t from = MinCut::kSource;
  for (size_t v = 2; v < kLength; ++v) {
    cut.add_edge(from, v, v == kLength / 2 ? 1 : 9);
    from = v;
  }
  cut.add_edge(from, MinCut::kSink, 9);
  EXPECT_EQ(cut.solve(), 1);
}

TEST(MinCut, RefusesWhatHasNoFiniteCut) {
  MinCut cut(2);
  cut.add_edge(MinCut::kSource, MinCut::kSink, MinCut::kInfinite);
  EXPECT_THROW(cut.solve(), InternalError);
  EXPECT_THROW(cut.add_edge(0, 1, -1), InternalError);
}

}  // namespace
}  // namespace ortrain
