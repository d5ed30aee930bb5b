// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/memory_budget.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/base/log.h"
#include "ortrain/passes/pipeline.h"
#include "ortrain/training/recompute_search.h"

namespace ortrain {
namespace {

bool has_backward(const Graph& graph) {
  return std::ranges::any_of(graph.order(),
                             [&](NodeId id) { return graph.node(id).phase == Phase::backward; });
}

class BudgetedPlans {
 public:
  BudgetedPlans(Graph unfused, MemoryBudget budget, std::function<void(Graph&)> finish)
      : prepared_(std::move(unfused)), budget_(budget), finish_(std::move(finish)) {
    check(budget.is_set(), "a budget is in bytes or a share");
  }

  std::shared_ptr<const ExecutionPlan> make(const Graph& graph, const std::vector<Dims>& dims,
                                            const KernelRegistry& kernels,
                                            const PlanOptions& options) {
    const bool trains = has_backward(prepared_);
    if (budget_.bytes == 0 && !trains) return make_execution_plan(graph, dims, kernels, options);
    // Only the plan that is taken puts anything on a device.
    PlanOptions tried = options;
    tried.sizes_only = !kernels.device().is_host();
    const auto taken = [&](const Graph& of, const ExecutionPlan& plan) {
      return std::make_shared<ExecutionPlan>(
          plan.sizes_only ? *make_execution_plan(of, dims, kernels, options) : plan);
    };
    const std::shared_ptr<const ExecutionPlan> without =
        make_execution_plan(graph, dims, kernels, tried);
    largest_ = std::max(largest_, without->total_bytes());
    const uint64_t limit =
        budget_.bytes > 0
            ? budget_.bytes
            : static_cast<uint64_t>(std::floor(budget_.share * static_cast<double>(largest_)));
    RecomputationSummary summary{.budget_bytes = limit,
                                 .total_bytes_without = without->total_bytes(),
                                 .arena_bytes_without = without->arena_bytes};
    if (without->total_bytes() <= limit) {
      auto plan = taken(graph, *without);
      plan->recomputation = std::move(summary);
      return plan;
    }
    if (!trains) {
      throw OutOfMemoryError(str(unreachable(limit), "the forward alone takes ",
                                 without->total_bytes(), " bytes, and nothing can be left out of ",
                                 "it; ", what_bounds(graph, *without)));
    }
    if (is_disabled(std::string(kRecomputeForMemory))) {
      throw OutOfMemoryError(str(unreachable(limit), "the plan takes ", without->total_bytes(),
                                 " bytes, and ORTRAIN_DISABLE_PASSES names ", kRecomputeForMemory));
    }
    if (!is_prepared_) {
      run_pipeline(prepared_, "fuse", StagePart::up_to_recompute);
      is_prepared_ = true;
    }
    const auto start = std::chrono::steady_clock::now();
    const int made_before = graphs_.num_made();
    RecomputeSearch search(prepared_, dims, kernels, tried, finish_, graphs_);
    const RecomputeSearch::Candidate* found = search.find(limit);
    log_line(
        "plan",
        str("recomputation: ", search.num_candidates(), " plans tried, ",
            graphs_.num_made() - made_before, " graphs made, in ",
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() * 1e3,
            " ms"));
    if (found == nullptr) {
      const RecomputeSearch::Candidate* least = search.least();
      const bool helps = least != nullptr && least->plan->total_bytes() < without->total_bytes();
      const Graph& least_graph = helps ? *least->graph : graph;
      const ExecutionPlan& least_plan = helps ? *least->plan : *without;
      throw OutOfMemoryError(str(unreachable(limit), "without recomputation the step takes ",
                                 without->total_bytes(), " bytes, the least that recomputation ",
                                 "reaches is ", least_plan.total_bytes(), "; ",
                                 what_bounds(least_graph, least_plan)));
    }
    auto plan = taken(*found->graph, *found->plan);
    plan->rewritten = found->graph;
    search.describe(*found, summary);
    summary.time_share = found->time / estimated_time(*without);
    plan->recomputation = std::move(summary);
    return plan;
  }

 private:
  std::string unreachable(uint64_t limit) const {
    const std::string share = budget_.bytes > 0 ? "" : str(" (", budget_.share, "x)");
    return str("max_memory of ", limit, " bytes", share, " cannot be reached: ");
  }

  Graph prepared_;  // before its first use as it was given, then up to recompute_checkpoints
  bool is_prepared_ = false;
  RewrittenGraphs graphs_;
  size_t largest_ = 0;  // of the plans that compute nothing again
  const MemoryBudget budget_;
  const std::function<void(Graph&)> finish_;
};

}  // namespace

Session::PlanFunction plan_within(Graph unfused, MemoryBudget budget,
                                  std::function<void(Graph&)> finish) {
  auto plans = std::make_shared<BudgetedPlans>(std::move(unfused), budget, std::move(finish));
  return [plans](const Graph& graph, const std::vector<Dims>& dims, const KernelRegistry& kernels,
                 const PlanOptions& options) { return plans->make(graph, dims, kernels, options); };
}

}  // namespace ortrain
