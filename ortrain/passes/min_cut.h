// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ortrain {

// The cheapest set of edges whose removal leaves no path from the source to the sink, by the
// largest flow (Dinic 1970: blocking flows in layered graphs). O(V^2 E), near linear on the sparse
// graphs of programs.
class MinCut {
 public:
  static constexpr size_t kSource = 0, kSink = 1;
  // Never cut while a finite cut exists. Finite capacities must add up to less.
  static constexpr int64_t kInfinite = INT64_MAX / 4;

  // Vertices are 0 to `num_vertices` - 1, the source and the sink among them.
  explicit MinCut(size_t num_vertices);

  void add_edge(size_t from, size_t to, int64_t capacity);
  // Returns what the cut costs. Called once.
  int64_t solve();
  // After solve(): of all cheapest cuts the one with the fewest vertices at the source.
  bool is_at_source(size_t vertex) const { return level_[vertex] >= 0; }

 private:
  struct Edge {
    size_t to;
    int64_t left;  // capacity that no flow uses; the edge back is the next or previous one
  };

  bool find_levels();
  int64_t push_along_levels();

  std::vector<Edge> edges_;
  std::vector<std::vector<size_t>> edges_of_;  // by vertex: into edges_
  std::vector<int> level_;                     // -1: not reached
  std::vector<size_t> next_edge_;              // those before it lead nowhere
};

}  // namespace ortrain
