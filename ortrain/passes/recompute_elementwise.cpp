// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/recompute_elementwise.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "ortrain/ir/op_registry.h"
#include "ortrain/passes/choose_recomputation.h"
#include "ortrain/passes/fusion_groups.h"
#include "ortrain/passes/recomputation.h"

namespace ortrain {
namespace {

// What an open extent counts as where sizes are compared.
constexpr int64_t kNominalExtent = 512;
// Time to compute an element again, in bytes that are kept meanwhile: an H100 does 18 operations
// of float32 while it moves a byte.
constexpr double kTimePerElement = 1.0 / 16;
// What keeping a byte counts more that the forward writes for that alone. As much as it moves more
// would be 2; the cut then finds what keeps more bytes, which is not taken.
constexpr double kWritingPrice = 1.5;

size_t index_of(int32_t id) { return static_cast<size_t>(id); }

// May show the memory of its first input.
bool may_be_view(const Node& node) {
  static constexpr std::array<std::string_view, 9> kOps{"Expand",  "Flatten",   "Identity",
                                                        "Reshape", "Slice",     "Split",
                                                        "Squeeze", "Transpose", "Unsqueeze"};
  if (node.op == "StopGradient") return true;
  return node.domain.empty() && std::ranges::find(kOps, node.op) != kOps.end();
}

bool is_16_bit_float(DType dtype) { return is_float(dtype) && size_of(dtype) == 2; }

double nominal_bytes(const Value& value) {
  double bytes = static_cast<double>(size_of(value.dtype));
  for (const Dim& extent : value.shape) {
    std::map<std::string, int64_t> bindings;
    for (const std::string& symbol : extent.symbols()) bindings[symbol] = kNominalExtent;
    bytes *= static_cast<double>(std::max<int64_t>(0, extent.evaluate(bindings).value_or(0)));
  }
  return bytes;
}

// Sums of bytes that hold for any extents: the open ones as text, and a number before them.
class OpenBytes {
 public:
  void add(const Value& value, double sign) {
    double factor = sign * static_cast<double>(size_of(value.dtype));
    Dim open(1);
    for (const Dim& extent : value.shape) {
      if (extent.is_constant()) {
        factor *= static_cast<double>(extent.constant());
      } else {
        open = open * extent;
      }
    }
    if (open.is(1)) {
      fixed_ += factor;
    } else {
      open_[open.str()] += factor;
    }
  }
  // Whatever the extents are, as long as none is 0.
  bool at_most_zero() const {
    double sum = fixed_;
    for (const auto& [extents, factor] : open_) {
      if (factor > 0) return false;
      sum += factor;
    }
    return sum <= 0;
  }

 private:
  double fixed_ = 0;
  std::map<std::string, double> open_;
};

class ElementwiseRecomputation {
 public:
  explicit ElementwiseRecomputation(Graph& graph)
      : graph_(graph), groups_(graph), users_(graph.users()) {}

  bool run() {
    find_reads();
    if (!find_candidates()) return false;
    std::vector<bool> is_kept = cheapest_cut();
    do {
      keep_what_does_not_pay(is_kept);
    } while (keep_what_would_differ(is_kept));
    const size_t num_values = graph_.num_values();
    const size_t num_nodes = graph_.num_node_slots();
    if (recompute_in_backward(graph_, is_kept).empty()) return false;
    round_as_stores_do(num_values, num_nodes);
    return true;
  }

 private:
  struct Balance {
    OpenBytes kept;
    double moved = 0;
    std::set<ValueId> sources;
  };

  const Value& result(NodeId id) const { return graph_.value(graph_.node(id).outputs[0]); }
  bool is_candidate(NodeId id) const { return home_[index_of(id)] != kNoNode; }
  bool reads_in_backward(NodeId id) const {
    return graph_.node(id).phase == Phase::backward && !reads_shapes_only(graph_.node(id));
  }

  void find_reads();
  bool find_candidates();
  bool may_run_again(NodeId id) const;
  bool can_be_read_again(ValueId id) const;
  NodeId find_home(NodeId id);
  std::vector<bool> cheapest_cut() const;
  bool runs_again(NodeId id, const std::vector<bool>& is_kept) const {
    return id != kNoNode && is_candidate(id) && !is_kept[index_of(graph_.node(id).outputs[0])];
  }
  void keep_what_does_not_pay(std::vector<bool>& is_kept);
  bool keep_what_would_differ(std::vector<bool>& is_kept) const;
  void add_result(NodeId id, Balance& balance) const;
  void add_source(ValueId id, NodeId home, Balance& balance) const;
  bool is_written_anyway(ValueId id) const;
  void round_as_stores_do(size_t num_values, size_t num_nodes);

  Graph& graph_;
  FusionGroups groups_;
  std::vector<std::vector<NodeId>> users_;
  std::vector<bool> is_read_;         // by ValueId: by the backward
  std::vector<ValueId> memory_of_;    // by ValueId: the value whose memory it may show
  std::vector<int> reads_of_memory_;  // by ValueId: values in its memory that the backward reads
  std::vector<bool> is_output_;       // by ValueId: something in its memory is a graph output
  // By NodeId, of forward nodes that may run again: a node of the backward whose kernel they join.
  std::vector<NodeId> home_;
};

void ElementwiseRecomputation::find_reads() {
  const size_t count = graph_.num_values();
  is_read_.assign(count, false);
  memory_of_.resize(count);
  for (size_t v = 0; v < count; ++v) memory_of_[v] = static_cast<ValueId>(v);
  for (NodeId id : graph_.order()) {
    const Node& node = graph_.node(id);
    if (reads_in_backward(id)) {
      for (ValueId input : node.inputs) {
        if (input != kNoValue) is_read_[index_of(input)] = true;
      }
    }
    if (!may_be_view(node) || node.inputs[0] == kNoValue) continue;
    for (ValueId output : node.outputs) {
      if (output != kNoValue) memory_of_[index_of(output)] = memory_of_[index_of(node.inputs[0])];
    }
  }
  reads_of_memory_.assign(count, 0);
  for (size_t v = 0; v < count; ++v) reads_of_memory_[index_of(memory_of_[v])] += is_read_[v];
  is_output_.assign(count, false);
  for (const GraphOutput& output : graph_.outputs()) {
    is_output_[index_of(memory_of_[index_of(output.value)])] = true;
  }
}

// The memory of inputs and outputs is the caller's.
bool ElementwiseRecomputation::can_be_read_again(ValueId id) const {
  const ValueId memory = memory_of_[index_of(id)];
  return graph_.value(id).kind == ValueKind::constant || is_read_[index_of(id)] ||
         (graph_.value(memory).kind != ValueKind::input && !is_output_[index_of(memory)]);
}

bool ElementwiseRecomputation::may_run_again(NodeId id) const {
  const Node& node = graph_.node(id);
  if (node.phase != Phase::forward || node.checkpoint != 0 || !groups_.is_elementwise(id)) {
    return false;
  }
  const OpDef& def = op_registry().get(node.domain, node.op);
  if (!def.expression || def.draws_random_numbers || !can_run_again(node)) return false;
  // Something else holds on to the memory of its result.
  const ValueId output = node.outputs[0];
  if (is_output_[index_of(output)] ||
      reads_of_memory_[index_of(output)] > (is_read_[index_of(output)] ? 1 : 0)) {
    return false;
  }
  return std::ranges::all_of(
      node.inputs, [&](ValueId input) { return input == kNoValue || can_be_read_again(input); });
}

// The kernel that all readers of a node's result in the backward are in, or can be put in; kNoNode
// if there is none: read by several kernels, it would be written and read after all.
NodeId ElementwiseRecomputation::find_home(NodeId id) {
  const ValueId output = graph_.node(id).outputs[0];
  NodeId home = kNoNode;
  for (NodeId user : users_[index_of(output)]) {
    NodeId reader = home_[index_of(user)];  // a forward node that runs again there
    if (reads_in_backward(user)) {
      if (!groups_.is_elementwise(user)) return kNoNode;
      reader = user;
    }
    if (reader == kNoNode) continue;
    if (home != kNoNode && groups_.join(home, reader) != nullptr) return kNoNode;
    home = reader;
  }
  const size_t members = is_16_bit_float(graph_.value(output).dtype) ? 2 : 1;  // with its rounding
  return home != kNoNode && groups_.admit(home, id, members) ? home : kNoNode;
}

bool ElementwiseRecomputation::find_candidates() {
  home_.assign(graph_.num_node_slots(), kNoNode);
  bool found = false;
  const std::vector<NodeId>& order = graph_.order();
  for (auto id = order.rbegin(); id != order.rend(); ++id) {
    if (!may_run_again(*id)) continue;
    home_[index_of(*id)] = find_home(*id);
    found = found || is_candidate(*id);
  }
  return found;
}

std::vector<bool> ElementwiseRecomputation::cheapest_cut() const {
  RecomputeCosts costs;
  double sum = 1;  // of what keeping anything may cost
  for (size_t v = 0; v < graph_.num_values(); ++v) {
    costs.bytes.push_back(nominal_bytes(graph_.value(static_cast<ValueId>(v))));
    if (graph_.value(static_cast<ValueId>(v)).kind == ValueKind::computed)
      sum += kWritingPrice * costs.bytes[v];
  }
  costs.time.assign(graph_.num_node_slots(), sum);  // never
  for (NodeId id : graph_.order()) {
    if (!is_candidate(id)) continue;
    const double size = static_cast<double>(size_of(result(id).dtype));
    costs.time[index_of(id)] =
        costs.bytes[index_of(graph_.node(id).outputs[0])] / size * kTimePerElement;
  }
  std::vector<double> price(graph_.num_values(), 1);
  for (size_t v = 0; v < price.size(); ++v) {
    const auto id = static_cast<ValueId>(v);
    const NodeId producer = graph_.value(id).producer;
    if (producer != kNoNode && !is_written_anyway(id)) price[v] = kWritingPrice;
  }
  return choose_kept_values(graph_, costs, price);
}

// Some reader is not in the kernel that makes it, and remains.
bool ElementwiseRecomputation::is_written_anyway(ValueId id) const {
  const NodeId producer = graph_.value(id).producer;
  if (!groups_.is_elementwise(producer) || is_output_[index_of(id)]) return true;
  return std::ranges::any_of(users_[index_of(id)], [&](NodeId user) {
    return !reads_in_backward(user) && groups_.of(user) != groups_.of(producer);
  });
}

// It is not kept: not read, and not written if it was for the backward alone.
void ElementwiseRecomputation::add_result(NodeId id, Balance& balance) const {
  const ValueId output = graph_.node(id).outputs[0];
  if (!is_read_[index_of(output)]) return;
  balance.kept.add(graph_.value(output), -1);
  balance.moved -= nominal_bytes(graph_.value(output)) * (is_written_anyway(output) ? 1 : 2);
}

// It is read, and kept if it was not.
void ElementwiseRecomputation::add_source(ValueId id, NodeId home, Balance& balance) const {
  const Value& value = graph_.value(id);
  if (!balance.sources.insert(id).second) return;
  const bool is_read_there = std::ranges::any_of(users_[index_of(id)], [&](NodeId user) {
    return reads_in_backward(user) && groups_.of(user) == groups_.of(home);
  });
  if (!is_read_there) balance.moved += nominal_bytes(value);
  if (value.kind != ValueKind::computed || is_read_[index_of(id)]) return;
  balance.kept.add(value, 1);
  if (!is_written_anyway(id)) balance.moved += nominal_bytes(value);
}

// The cut counts bytes that are kept, at nominal extents. Nodes that hang together are judged
// together, by what moves too.
void ElementwiseRecomputation::keep_what_does_not_pay(std::vector<bool>& is_kept) {
  const auto runs_again = [&](NodeId id) { return this->runs_again(id, is_kept); };
  std::vector<NodeId> leader(graph_.num_node_slots());
  for (size_t n = 0; n < leader.size(); ++n) leader[n] = static_cast<NodeId>(n);
  const auto find = [&](NodeId id) {
    while (leader[index_of(id)] != id) {
      id = leader[index_of(id)] = leader[index_of(leader[index_of(id)])];
    }
    return id;
  };
  std::vector<NodeId> again;
  for (NodeId id : graph_.order()) {
    if (!runs_again(id)) continue;
    again.push_back(id);
    for (ValueId input : graph_.node(id).inputs) {
      const NodeId producer = input == kNoValue ? kNoNode : graph_.value(input).producer;
      if (runs_again(producer)) leader[index_of(find(producer))] = find(id);
    }
  }
  std::map<NodeId, Balance> balances;
  for (NodeId id : again) {
    Balance& balance = balances[find(id)];
    add_result(id, balance);
    for (ValueId input : graph_.node(id).inputs) {
      if (input == kNoValue || runs_again(graph_.value(input).producer)) continue;
      add_source(input, home_[index_of(id)], balance);
    }
  }
  for (NodeId id : again) {
    const Balance& balance = balances.at(find(id));
    if (balance.moved < 0 && balance.kept.at_most_zero()) continue;
    is_kept[index_of(graph_.node(id).outputs[0])] = true;
  }
}

// A 16-bit value is rounded where it is stored: a reader in the kernel that makes it has it as it
// was, others have it rounded. A copy must read what its original did, or comparisons and maxima
// come out otherwise: what cannot is kept. Returns whether there was such a node.
bool ElementwiseRecomputation::keep_what_would_differ(std::vector<bool>& is_kept) const {
  bool found = false;
  for (NodeId id : graph_.order()) {
    if (!runs_again(id, is_kept)) continue;
    const bool differs = std::ranges::any_of(graph_.node(id).inputs, [&](ValueId input) {
      if (input == kNoValue || !is_16_bit_float(graph_.value(input).dtype)) return false;
      const NodeId producer = graph_.value(input).producer;
      if (producer == kNoNode || graph_.node(producer).op == "Cast") return false;  // rounds
      const bool one_kernel =
          groups_.is_elementwise(producer) && groups_.of(producer) == groups_.of(id);
      return one_kernel != runs_again(producer, is_kept);
    });
    if (!differs) continue;
    is_kept[index_of(graph_.node(id).outputs[0])] = true;
    found = true;
  }
  return found;
}

// Fused nodes round what they store and nothing in between. What the backward has read from memory
// was rounded, what was used inside of the forward's kernel was not: so it is again.
void ElementwiseRecomputation::round_as_stores_do(size_t num_values, size_t num_nodes) {
  std::map<ValueId, ValueId> rounded;
  const std::vector<NodeId> order = graph_.order();
  for (NodeId id : order) {
    if (index_of(id) >= num_nodes) continue;
    for (ValueId& input : graph_.node(id).inputs) {
      if (input == kNoValue || index_of(input) < num_values) continue;
      const Value value = graph_.value(input);
      const Node& copy = graph_.node(value.producer);
      const bool is_rounded = copy.op == "Cast" && copy.domain.empty();
      if (!is_16_bit_float(value.dtype) || is_rounded) continue;
      const auto [found, is_new] = rounded.try_emplace(input, kNoValue);
      if (is_new) {
        found->second = graph_.add_value(value.name + ".rounded", value.dtype, value.shape);
        graph_.add_node({.op = "Cast",
                         .domain = "",
                         .name = copy.name,
                         .inputs = {input},
                         .outputs = {found->second},
                         .attributes = {{"to", static_cast<int64_t>(value.dtype)}},
                         .phase = Phase::backward});
      }
      input = found->second;
    }
  }
}

bool run(Graph& graph) {
  const bool has_backward = std::ranges::any_of(
      graph.order(), [&](NodeId id) { return graph.node(id).phase == Phase::backward; });
  return has_backward && ElementwiseRecomputation(graph).run();
}

}  // namespace

Pass recompute_elementwise() {
  return {.name = "recompute_elementwise",
          .summary =
              "On GPUs, elementwise values that a kernel of the backward reads are computed "
              "again in it, where fewer bytes move.",
          .run = run,
          .of_gpus = true};
}

}  // namespace ortrain
