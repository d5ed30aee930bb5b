// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ortrain/base/dim.h"
#include "ortrain/base/dtype.h"
#include "ortrain/ir/attribute.h"

namespace ortrain {

using ValueId = int32_t;
using NodeId = int32_t;
inline constexpr ValueId kNoValue = -1;  // an absent optional input or an output nobody wants
inline constexpr NodeId kNoNode = -1;

// Standard operators have the empty domain, ours this one.
inline constexpr std::string_view kOrtrainDomain = "ortrain";
// The opset of the standard domain that graphs in memory follow.
inline constexpr int kOnnxOpset = 23;
// The newest one that files may follow: what changed since for our operators are element types that
// the engine does not hold, and attributes for them.
inline constexpr int kNewestOnnxOpset = 28;

enum class ValueKind { input, constant, computed };
// `derived`: the engine computes it from other inputs before it runs the graph. `state`: what an
// optimizer keeps from step to step, and gradients that add up.
enum class InputRole { user, parameter, buffer, seed, gradient, derived, state };
// `state_update`: the next value of a parameter or state. `token`: what nodes with effects outside
// of the graph leave behind in their order; it keeps them, and nobody reads it.
enum class OutputRole { user, buffer_update, input_update, gradient, state_update, token };
// Forward nodes run before the user sees the outputs, backward nodes after gradients came in.
enum class Phase { forward, backward };

struct Value {
  std::string name;  // unique in the graph
  DType dtype = DType::undefined;
  Shape shape;
  ValueKind kind = ValueKind::computed;
  NodeId producer = kNoNode;  // for computed values
  int output_index = 0;       // which output of the producer
  TensorData constant;        // for constants
  // Contents of small integer tensors of rank 0 or 1 when known (shape arithmetic).
  std::optional<std::vector<Dim>> known;
};

struct Node {
  std::string op;
  std::string domain;
  std::string name;  // layer path, e.g. "encoder.layer.0.attention/MatMul"
  std::vector<ValueId> inputs;
  std::vector<ValueId> outputs;
  Attributes attributes;
  Phase phase = Phase::forward;
  // Forward nodes of one checkpoint (from 1; 0: of none) are computed again for the backward.
  int checkpoint = 0;
};

struct GraphInput {
  ValueId value = kNoValue;
  InputRole role = InputRole::user;
  // parameter, buffer, state: its qualified name; gradient: the name of the output it belongs to.
  std::string target;
  bool requires_grad = false;
};

struct GraphOutput {
  ValueId value = kNoValue;
  std::string name;
  OutputRole role = OutputRole::user;
  // buffer_update, state_update: the target of the input that it updates; input_update, gradient:
  // the name of the input that it updates or belongs to.
  std::string target;
};

// A dataflow graph in single-assignment form. Nodes and values are addressed by ids that stay
// valid until the node or value is removed; `order()` is a topological order.
class Graph {
 public:
  std::string name;

  // --- values
  // Throws ShapeError where the extents that are known fit into no memory.
  ValueId add_input(GraphInput input, std::string value_name, DType dtype, Shape shape);
  // Constants with equal bytes of at most 1 KiB are shared.
  ValueId add_constant(TensorData data, std::string value_name = "");
  // A value that the caller makes the output of a node.
  ValueId add_value(std::string value_name, DType dtype, Shape shape);
  // Throws InternalError for kNoValue, and for an id of another graph.
  const Value& value(ValueId id) const { return at(values_, id); }
  Value& value(ValueId id) { return at(values_, id); }
  size_t num_values() const { return values_.size(); }
  ValueId find_value(std::string_view value_name) const;  // kNoValue if there is none
  void rename_value(ValueId id, std::string value_name);

  // --- nodes
  NodeId add_node(Node node);
  const Node& node(NodeId id) const { return at(nodes_, id); }
  Node& node(NodeId id) { return at(nodes_, id); }
  // Its outputs must have no users left.
  void remove_node(NodeId id);
  const std::vector<NodeId>& order() const { return order_; }
  size_t num_node_slots() const { return nodes_.size(); }
  bool alive(NodeId id) const { return alive_[static_cast<size_t>(id)]; }

  // --- inputs and outputs
  const std::vector<GraphInput>& inputs() const { return inputs_; }
  std::vector<GraphInput>& inputs() { return inputs_; }
  const std::vector<GraphOutput>& outputs() const { return outputs_; }
  std::vector<GraphOutput>& outputs() { return outputs_; }
  void add_output(GraphOutput output) { outputs_.push_back(std::move(output)); }
  const GraphInput* find_input(ValueId id) const;

  // --- structure
  // Which nodes read each value, in order; a node that reads it twice stands twice.
  std::vector<std::vector<NodeId>> users() const;
  // Every node input and graph output that is `from` becomes `to`.
  void replace_uses(ValueId from, ValueId to);
  // Restores topological order, moving as few nodes as possible; throws InvalidModelError on a
  // cycle.
  void sort();
  // Takes an order of the caller's: the same nodes, each after what it reads. Throws
  // InvalidModelError for another one.
  void reorder(std::vector<NodeId> order);
  // Drops nodes whose outputs nobody reads, and unused constants. Returns how many nodes went.
  int remove_dead_nodes();

  // "[Op 'layer'] ", the frame for messages about a node.
  static std::string context(const Node& node);

 private:
  std::string unique_name(std::string wanted);
  [[noreturn]] static void refuse_id(int64_t id, size_t count);

  template <class Items>
  static auto at(Items& items, int64_t id) -> decltype(items[0]) {
    if (static_cast<uint64_t>(id) >= items.size()) [[unlikely]] {
      refuse_id(id, items.size());
    }
    return items[static_cast<size_t>(id)];
  }

  // Deques: references to nodes and values stay valid while others are added.
  std::deque<Value> values_;
  std::deque<Node> nodes_;
  std::vector<bool> alive_;
  std::vector<NodeId> order_;
  std::vector<GraphInput> inputs_;
  std::vector<GraphOutput> outputs_;
  std::unordered_map<std::string, ValueId> by_name_;
  std::unordered_map<std::string, int> name_counts_;
  std::unordered_multimap<size_t, ValueId> constants_by_hash_;
};

}  // namespace ortrain
