// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/min_cut.h"

#include <algorithm>

#include "ortrain/base/error.h"

namespace ortrain {

MinCut::MinCut(size_t num_vertices)
    : edges_of_(num_vertices), level_(num_vertices, -1), next_edge_(num_vertices, 0) {
  check(num_vertices >= 2, "a cut lies between two vertices");
}

void MinCut::add_edge(size_t from, size_t to, int64_t capacity) {
  check(capacity >= 0, "a capacity is negative");
  edges_of_[from].push_back(edges_.size());
  edges_.push_back({to, capacity});
  edges_of_[to].push_back(edges_.size());
  edges_.push_back({from, 0});
}

bool MinCut::find_levels() {
  std::ranges::fill(level_, -1);
  std::vector<size_t> queue{kSource};
  level_[kSource] = 0;
  for (size_t at = 0; at < queue.size(); ++at) {
    const size_t vertex = queue[at];
    for (size_t e : edges_of_[vertex]) {
      if (edges_[e].left == 0 || level_[edges_[e].to] >= 0) continue;
      level_[edges_[e].to] = level_[vertex] + 1;
      queue.push_back(edges_[e].to);
    }
  }
  return level_[kSink] >= 0;
}

// One path from the source to the sink; 0 when there is none. Without recursion: paths are as long
// as programs.
int64_t MinCut::push_along_levels() {
  std::vector<size_t> path;  // edges
  size_t vertex = kSource;
  while (vertex != kSink) {
    bool advanced = false;
    for (size_t& next = next_edge_[vertex]; next < edges_of_[vertex].size(); ++next) {
      const size_t e = edges_of_[vertex][next];
      if (edges_[e].left == 0 || level_[edges_[e].to] != level_[vertex] + 1) continue;
      path.push_back(e);
      vertex = edges_[e].to;
      advanced = true;
      break;
    }
    if (advanced) continue;
    if (path.empty()) return 0;
    vertex = edges_[path.back() ^ 1].to;
    path.pop_back();
    ++next_edge_[vertex];
  }
  int64_t amount = kInfinite;
  for (size_t e : path) amount = std::min(amount, edges_[e].left);
  for (size_t e : path) {
    edges_[e].left -= amount;
    edges_[e ^ 1].left += amount;
  }
  return amount;
}

int64_t MinCut::solve() {
  int64_t total = 0;
  while (find_levels()) {
    std::ranges::fill(next_edge_, 0);
    while (const int64_t amount = push_along_levels()) {
      total += amount;
      check(total < kInfinite, "every cut is infinite");
    }
  }
  return total;
}

}  // namespace ortrain
