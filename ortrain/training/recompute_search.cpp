// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/recompute_search.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "ortrain/base/error.h"
#include "ortrain/passes/pipeline.h"
#include "ortrain/passes/recomputation.h"
#include "ortrain/plan/resolve_shapes.h"
#include "ortrain/runtime/arena_buffers.h"

namespace ortrain {
namespace {

// FLOPs that a machine does while it moves a byte. Processors of one kind differ by a factor of 2
// or so; only whether products or elementwise nodes go first hangs on it.
constexpr double kFlopsPerByte = 16;
// Prices that are tried, as powers of this, and how often it is halved again.
constexpr double kPriceStep = 4;
constexpr int kPriceSteps = 9;
constexpr int kPriceHalvings = 2;
// Of the forward, when a price is taken back from its end.
constexpr size_t kPlaceSteps = 16;
constexpr std::array kParts{2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96};
// Divisions of the forward for which prices are tried too.
constexpr size_t kMostDivisions = 2;

size_t index_of(int32_t id) { return static_cast<size_t>(id); }

double time_of(double bytes, double flops) { return bytes + flops / kFlopsPerByte; }

// From the plan of the graph before it is fused.
RecomputeCosts costs_of(const Graph& graph, const ExecutionPlan& plan,
                        const std::vector<Dims>& dims) {
  RecomputeCosts costs;
  costs.time.assign(graph.num_node_slots(), 0);
  costs.bytes.assign(graph.num_values(), 0);
  const auto bytes_of = [&](ValueId id) {
    return static_cast<double>(TensorSpec{graph.value(id).dtype, dims[index_of(id)]}.bytes());
  };
  for (const PlanStep& step : plan.steps) {
    if (step.node == kNoNode) continue;
    costs.time[index_of(step.node)] = time_of(step.bytes, step.flops);
    for (ValueId output : graph.node(step.node).outputs) {
      if (output != kNoValue) costs.bytes[index_of(output)] = bytes_of(output);
    }
  }
  // Views of inputs and constants are there as those are.
  for (const PlanView& view : plan.views) {
    const Node& node = graph.node(view.node);
    if (costs.bytes[index_of(node.inputs[0])] == 0) continue;
    for (ValueId output : node.outputs) {
      if (output != kNoValue) costs.bytes[index_of(output)] = bytes_of(output);
    }
  }
  // So are results, and what they are views of.
  std::vector<bool> is_view(graph.num_node_slots(), false);
  for (const PlanView& view : plan.views) is_view[index_of(view.node)] = true;
  for (const GraphOutput& output : graph.outputs()) {
    ValueId id = output.value;
    const double bytes = bytes_of(id);
    while (true) {
      costs.bytes[index_of(id)] = 0;
      const NodeId producer = graph.value(id).producer;
      if (producer == kNoNode || !is_view[index_of(producer)]) break;
      id = graph.node(producer).inputs[0];
      if (bytes_of(id) != bytes) break;
    }
  }
  return costs;
}

}  // namespace

double estimated_time(const ExecutionPlan& plan) {
  double sum = 0;
  for (const PlanStep& step : plan.steps) sum += time_of(step.bytes, step.flops);
  return sum;
}

const RewrittenGraphs::Rewritten& RewrittenGraphs::find_or_make(
    const std::vector<bool>& kept, const std::function<Rewritten()>& make) {
  auto found = entries_.find(kept);
  if (found == entries_.end()) {
    Rewritten made = make();
    ++num_made_;
    if (entries_.size() >= kMost) {
      entries_.erase(std::ranges::min_element(
          entries_, {}, [](const auto& entry) { return entry.second.last_use; }));
    }
    found = entries_.emplace(kept, Entry{std::move(made)}).first;
  }
  found->second.last_use = ++uses_;
  return found->second.rewritten;
}

RecomputeSearch::RecomputeSearch(const Graph& prepared, const std::vector<Dims>& input_dims,
                                 const KernelRegistry& kernels, const PlanOptions& options,
                                 const std::function<void(Graph&)>& finish, RewrittenGraphs& graphs)
    : prepared_(prepared),
      input_dims_(input_dims),
      kernels_(kernels),
      options_(options),
      finish_(finish),
      graphs_(graphs),
      place_of_(prepared.num_values(), 0) {
  const std::shared_ptr<const ExecutionPlan> unfused =
      make_execution_plan(prepared, input_dims, kernels, options);
  costs_ = costs_of(prepared, *unfused, resolve_shapes(prepared, input_dims).dims);
  for (NodeId id : prepared.order()) {
    if (prepared.node(id).phase != Phase::forward) continue;
    for (ValueId output : prepared.node(id).outputs) {
      if (output != kNoValue) place_of_[index_of(output)] = num_places_;
    }
    ++num_places_;
  }
}

const RecomputeSearch::Candidate& RecomputeSearch::at_price(const std::vector<double>& price) {
  const auto [found, is_added] =
      candidates_.try_emplace(choose_kept_values(prepared_, costs_, price));
  Candidate& candidate = found->second;
  if (!is_added) return candidate;
  const auto& [graph, recomputed] =
      graphs_.find_or_make(found->first, [&] { return rewritten(found->first); });
  candidate.graph = graph;
  candidate.recomputed = recomputed;
  candidate.plan = make_execution_plan(*graph, input_dims_, kernels_, options_);
  candidate.time = estimated_time(*candidate.plan);
  const size_t bytes = candidate.plan->total_bytes();
  if (least_ == nullptr || bytes < least_->plan->total_bytes()) least_ = &candidate;
  if (bytes <= limit_ && (best_ == nullptr || candidate.time < best_->time)) best_ = &candidate;
  return candidate;
}

RewrittenGraphs::Rewritten RecomputeSearch::rewritten(const std::vector<bool>& kept) const {
  auto graph = std::make_shared<Graph>(prepared_);
  std::vector<NodeId> recomputed = recompute_in_backward(*graph, kept);
  graph->sort();
  graph->remove_dead_nodes();
  run_pipeline(*graph, "fuse", StagePart::behind_recompute,
               kernels_.device().is_host() ? Processor::cpu : Processor::gpu);
  if (finish_) finish_(*graph);
  return {std::move(graph), std::move(recomputed)};
}

std::vector<double> RecomputeSearch::prices(const std::vector<bool>& kept, double low, double high,
                                            size_t place) const {
  std::vector<double> result(prepared_.num_values());
  for (size_t v = 0; v < result.size(); ++v) {
    result[v] = kept[v] ? 0 : place_of_[v] < place ? high : low;
  }
  return result;
}

bool RecomputeSearch::raise_price(const std::vector<bool>& kept) {
  double low = 0, high = 1;
  for (int step = 0; !fits(prices(kept, high, high, 0)); ++step) {
    if (step + 1 == kPriceSteps) return false;
    low = high;
    high *= kPriceStep;
  }
  for (int i = 0; i < kPriceHalvings && low > 0; ++i) {
    const double middle = std::sqrt(low * high);
    (fits(prices(kept, middle, middle, 0)) ? high : low) = middle;
  }
  size_t fitting = kPlaceSteps, exceeding = 0;
  while (fitting - exceeding > 1) {
    const size_t middle = (fitting + exceeding) / 2;
    const size_t place = num_places_ * middle / kPlaceSteps;
    (fits(prices(kept, low, high, place)) ? fitting : exceeding) = middle;
  }
  return true;
}

const RecomputeSearch::Candidate* RecomputeSearch::find(uint64_t limit_bytes) {
  limit_ = limit_bytes;
  if (raise_price(std::vector<bool>(prepared_.num_values(), false))) return best_;
  // Everything but what lies between parts is computed again, then the best divisions get prices.
  const double most = std::pow(kPriceStep, kPriceSteps);
  std::vector<std::pair<size_t, std::vector<bool>>> divisions;
  for (int parts : kParts) {
    std::vector<bool> kept = values_between_parts(prepared_, costs_, parts);
    const size_t bytes = at_price(prices(kept, most, most, 0)).plan->total_bytes();
    divisions.emplace_back(bytes, std::move(kept));
  }
  std::ranges::stable_sort(divisions, {}, [](const auto& division) { return division.first; });
  for (size_t i = 0; i < std::min(kMostDivisions, divisions.size()); ++i) {
    if (divisions[i].first <= limit_) raise_price(divisions[i].second);
  }
  return best_;
}

void RecomputeSearch::describe(const Candidate& candidate, RecomputationSummary& summary) const {
  for (NodeId id : candidate.recomputed) {
    if (costs_.time[index_of(id)] == 0) continue;  // a view
    ++summary.nodes[prepared_.node(id).op];
    for (ValueId output : prepared_.node(id).outputs) {
      if (output != kNoValue) summary.bytes += costs_.bytes[index_of(output)];
    }
  }
}

std::string what_bounds(const Graph& graph, const ExecutionPlan& plan) {
  const std::string sizes = str("it has results of ", plan.forward_output_bytes,
                                " bytes, gradients of ", plan.gradient_bytes, ", constants of ",
                                plan.constant_bytes, " and an arena of ", plan.arena_bytes);
  std::vector<ArenaBuffer> buffers = arena_buffers(graph, plan);
  std::vector<size_t> alive(plan.steps.size(), 0);
  for (const ArenaBuffer& buffer : buffers) {
    for (int step = buffer.step; step <= buffer.last_step; ++step) {
      alive[index_of(step)] += buffer.bytes;
    }
  }
  if (buffers.empty()) return sizes;
  const auto worst = static_cast<int>(std::ranges::max_element(alive) - alive.begin());
  std::erase_if(buffers, [&](const ArenaBuffer& buffer) {
    return buffer.step > worst || buffer.last_step < worst;
  });
  std::ranges::stable_sort(buffers, std::greater(), &ArenaBuffer::bytes);
  std::string largest;
  for (size_t i = 0; i < std::min<size_t>(3, buffers.size()); ++i) {
    const ValueId id = buffers[i].value;
    largest += str(i > 0 ? ", " : "", id == kNoValue ? "workspace" : graph.value(id).name, " ",
                   buffers[i].bytes);
  }
  const NodeId node = plan.steps[index_of(worst)].node;
  const std::string where =
      node == kNoNode ? "a copy into a result" : Graph::context(graph.node(node));
  return str(sizes, ", whose worst step is ", where, node == kNoNode ? " with " : "with ",
             buffers.size(), " buffers, the largest ", largest);
}

}  // namespace ortrain
