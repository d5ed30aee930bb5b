// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ortrain/ir/graph.h"
#include "ortrain/passes/choose_recomputation.h"
#include "ortrain/runtime/execution_plan.h"

namespace ortrain {

// Graphs in which what is not kept is computed again, by the values that are kept. They hold for
// any shapes, of which neighbours ask for the same ones; the least recently used goes.
class RewrittenGraphs {
 public:
  struct Rewritten {
    std::shared_ptr<const Graph> graph;
    std::vector<NodeId> recomputed;  // nodes of the prepared graph
  };

  const Rewritten& find_or_make(const std::vector<bool>& kept,
                                const std::function<Rewritten()>& make);
  int num_made() const { return num_made_; }

 private:
  static constexpr size_t kMost = 24;
  struct Entry {
    Rewritten rewritten;
    uint64_t last_use = 0;
  };
  std::map<std::vector<bool>, Entry> entries_;
  uint64_t uses_ = 0;
  int num_made_ = 0;
};

// Looks for the plan of one set of shapes that fits a number of bytes and computes least again.
//
// What a byte is worth, in time, is raised until the plan of the graph that the minimum cut asks
// for fits; then values from the end of the forward get the price below it back, as far as the plan
// still fits. A cut knows the sum of what is kept, and plans know the peak: a long chain computed
// in one go would raise it. So where the cut alone does not reach the budget, the forward is
// divided into parts, what lies between them is kept, and each part is computed again by itself.
class RecomputeSearch {
 public:
  struct Candidate {
    std::shared_ptr<const Graph> graph;
    std::shared_ptr<const ExecutionPlan> plan;
    double time = 0;                 // estimated_time of the plan
    std::vector<NodeId> recomputed;  // nodes of the prepared graph
  };

  // `prepared`: the graph up to recompute_checkpoints. `finish`: called behind stage "fuse".
  // `graphs`: of other searches with the same graph, device and `finish`.
  RecomputeSearch(const Graph& prepared, const std::vector<Dims>& input_dims,
                  const KernelRegistry& kernels, const PlanOptions& options,
                  const std::function<void(Graph&)>& finish, RewrittenGraphs& graphs);

  // The fitting plan of the least estimated time; null when none fits. Valid as long as the search.
  const Candidate* find(uint64_t limit_bytes);
  // The plan of the fewest bytes that was tried; null before find, and without any candidate.
  const Candidate* least() const { return least_; }
  size_t num_candidates() const { return candidates_.size(); }

  // Fills in what runs again.
  void describe(const Candidate& candidate, RecomputationSummary& summary) const;

 private:
  const Candidate& at_price(const std::vector<double>& price);
  RewrittenGraphs::Rewritten rewritten(const std::vector<bool>& kept) const;
  // By ValueId: `high` for what is made before a place in the forward, else `low`; 0 for `kept`.
  std::vector<double> prices(const std::vector<bool>& kept, double low, double high,
                             size_t place) const;
  bool fits(const std::vector<double>& price) {
    return at_price(price).plan->total_bytes() <= limit_;
  }
  // Raises the price until a plan fits; false when none does.
  bool raise_price(const std::vector<bool>& kept);

  const Graph& prepared_;
  const std::vector<Dims>& input_dims_;
  const KernelRegistry& kernels_;
  const PlanOptions& options_;
  const std::function<void(Graph&)>& finish_;
  RewrittenGraphs& graphs_;
  RecomputeCosts costs_;
  std::vector<size_t> place_of_;  // by ValueId: of its producer in the forward
  size_t num_places_ = 0;
  uint64_t limit_ = 0;
  std::map<std::vector<bool>, Candidate> candidates_;  // by what is kept
  const Candidate* best_ = nullptr;
  const Candidate* least_ = nullptr;
};

// Of all steps, in bytes that could be moved meanwhile.
double estimated_time(const ExecutionPlan& plan);

// Says what the bytes of a plan are, and what is alive at the worst step of its arena.
std::string what_bounds(const Graph& graph, const ExecutionPlan& plan);

}  // namespace ortrain
