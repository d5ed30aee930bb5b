// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/choose_recomputation.h"

#include <algorithm>
#include <cmath>

#include "ortrain/passes/min_cut.h"
#include "ortrain/passes/recomputation.h"

namespace ortrain {
namespace {

size_t index_of(int32_t id) { return static_cast<size_t>(id); }

bool can_recompute(const Graph& graph, NodeId producer) {
  return producer != kNoNode && graph.node(producer).phase == Phase::forward &&
         can_run_again(graph.node(producer));
}

// By ValueId, whether a backward node reads it.
std::vector<bool> read_by_backward(const Graph& graph) {
  std::vector<bool> is_read(graph.num_values(), false);
  for (NodeId id : graph.order()) {
    const Node& node = graph.node(id);
    if (node.phase != Phase::backward || reads_shapes_only(node)) continue;
    for (ValueId input : node.inputs) {
      if (input != kNoValue) is_read[index_of(input)] = true;
    }
  }
  return is_read;
}

}  // namespace

std::vector<bool> choose_kept_values(const Graph& graph, const RecomputeCosts& costs,
                                     const std::vector<double>& price) {
  // Numbers up to this one are exact enough, and their sums far from infinite.
  constexpr double kRange = 1e12;
  double largest = 1;
  for (size_t v = 0; v < graph.num_values(); ++v) {
    largest = std::max(largest, price[v] * costs.bytes[v]);
  }
  for (NodeId id : graph.order()) largest = std::max(largest, costs.time[index_of(id)]);
  const auto scaled = [&](double cost) {
    return static_cast<int64_t>(std::ceil(cost / largest * kRange));
  };

  // A vertex per value, at the source where it is wanted in the backward, and one per node, at the
  // source where it runs again.
  const size_t num_values = graph.num_values();
  const auto value_vertex = [](ValueId id) { return 2 + index_of(id); };
  const auto node_vertex = [&](NodeId id) { return 2 + num_values + index_of(id); };
  MinCut cut(2 + num_values + graph.num_node_slots());
  const std::vector<bool> is_read = read_by_backward(graph);
  for (NodeId id : graph.order()) {
    const Node& node = graph.node(id);
    if (node.phase != Phase::forward) continue;
    const bool again = can_recompute(graph, id);
    for (ValueId output : node.outputs) {
      if (output == kNoValue) continue;
      if (is_read[index_of(output)]) {
        cut.add_edge(MinCut::kSource, value_vertex(output), MinCut::kInfinite);
      }
      const double keeping = price[index_of(output)] * costs.bytes[index_of(output)];
      cut.add_edge(value_vertex(output), again ? node_vertex(id) : MinCut::kSink, scaled(keeping));
    }
    if (!again) continue;
    cut.add_edge(node_vertex(id), MinCut::kSink, scaled(costs.time[index_of(id)]));
    if (reads_shapes_only(node)) continue;
    for (ValueId input : node.inputs) {
      if (input != kNoValue) {
        cut.add_edge(node_vertex(id), value_vertex(input), MinCut::kInfinite);
      }
    }
  }
  cut.solve();
  std::vector<bool> is_kept(num_values, true);
  for (NodeId id : graph.order()) {
    if (!can_recompute(graph, id) || !cut.is_at_source(node_vertex(id))) continue;
    for (ValueId output : graph.node(id).outputs) {
      // What is there anyway need not be made again, though its producer runs for other results.
      if (output != kNoValue && costs.bytes[index_of(output)] > 0) {
        is_kept[index_of(output)] = price[index_of(output)] == 0;
      }
    }
  }
  return is_kept;
}

std::vector<bool> values_between_parts(const Graph& graph, const RecomputeCosts& costs, int count) {
  struct Span {
    size_t made = 0, last_read = 0;  // places in the forward
  };
  std::vector<NodeId> forward;
  std::vector<Span> spans(graph.num_values());
  for (NodeId id : graph.order()) {
    const Node& node = graph.node(id);
    if (node.phase != Phase::forward) continue;
    for (ValueId output : node.outputs) {
      if (output != kNoValue) spans[index_of(output)] = {forward.size(), forward.size()};
    }
    if (!reads_shapes_only(node)) {
      for (ValueId input : node.inputs) {
        if (input != kNoValue) spans[index_of(input)].last_read = forward.size();
      }
    }
    forward.push_back(id);
  }
  const std::vector<bool> is_read = read_by_backward(graph);
  std::vector<double> crossing(forward.size() + 1, 0), kept(forward.size() + 1, 0);
  for (size_t place = 0; place < forward.size(); ++place) {
    for (ValueId output : graph.node(forward[place]).outputs) {
      if (output == kNoValue) continue;
      const Span span = spans[index_of(output)];
      crossing[span.made] += costs.bytes[index_of(output)];
      crossing[span.last_read] -= costs.bytes[index_of(output)];
      if (is_read[index_of(output)]) kept[place] += costs.bytes[index_of(output)];
    }
  }
  for (size_t place = 1; place < forward.size(); ++place) {
    crossing[place] += crossing[place - 1];
    kept[place] += kept[place - 1];
  }
  std::vector<bool> result(graph.num_values(), false);
  if (forward.empty()) return result;
  const double part = kept[forward.size() - 1] / count;
  size_t begin = 0;
  for (int k = 1; k < count; ++k) {
    // The place with the fewest bytes alive, from half a part before the even division to half a
    // part behind it.
    while (begin < forward.size() && kept[begin] < (k - 0.5) * part) ++begin;
    size_t best = begin;
    for (size_t place = begin; place < forward.size() && kept[place] < (k + 0.5) * part; ++place) {
      if (crossing[place] < crossing[best]) best = place;
    }
    for (size_t place = 0; place <= best && place < forward.size(); ++place) {
      for (ValueId output : graph.node(forward[place]).outputs) {
        if (output != kNoValue && spans[index_of(output)].last_read > best) {
          result[index_of(output)] = true;
        }
      }
    }
  }
  return result;
}

}  // namespace ortrain
