// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/graph.h"

#include <algorithm>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/error.h"

namespace ortrain {
namespace {

constexpr size_t kSharedConstantBytes = 1024;

size_t hash_of(const TensorData& data) {
  const std::string_view bytes(static_cast<const char*>(data.data()), data.bytes());
  size_t hash = std::hash<std::string_view>()(bytes);
  hash = hash * 31 + static_cast<size_t>(data.dtype());
  for (int64_t dim : data.dims()) hash = hash * 31 + static_cast<size_t>(dim);
  return hash;
}

// Rank 0 and 1 integers of a size that shape arithmetic uses.
std::optional<std::vector<Dim>> known_contents(const TensorData& data) {
  if (data.dtype() != DType::i64 && data.dtype() != DType::i32 && data.dtype() != DType::boolean) {
    return std::nullopt;
  }
  if (data.dims().size() > 1 || data.numel() > 64) return std::nullopt;
  const std::vector<int64_t> values = data.to_int64s();
  return std::vector<Dim>(values.begin(), values.end());
}

}  // namespace

std::string Graph::unique_name(std::string wanted) {
  if (wanted.empty()) wanted = "v";
  if (!by_name_.contains(wanted)) return wanted;
  for (;;) {
    std::string candidate = str(wanted, "_", ++name_counts_[wanted]);
    if (!by_name_.contains(candidate)) return candidate;
  }
}

ValueId Graph::add_value(std::string value_name, DType dtype, Shape shape) {
  const ValueId id = static_cast<ValueId>(values_.size());
  Value value;
  value.name = unique_name(std::move(value_name));
  value.dtype = dtype;
  value.shape = std::move(shape);
  by_name_.emplace(value.name, id);
  values_.push_back(std::move(value));
  return id;
}

ValueId Graph::add_input(GraphInput input, std::string value_name, DType dtype, Shape shape) {
  with_context(str("input '", value_name, "': "), [&] { check_extents(shape, size_of(dtype)); });
  const ValueId id = add_value(std::move(value_name), dtype, std::move(shape));
  value(id).kind = ValueKind::input;
  input.value = id;
  inputs_.push_back(std::move(input));
  return id;
}

ValueId Graph::add_constant(TensorData data, std::string value_name) {
  const bool share = value_name.empty() && data.bytes() <= kSharedConstantBytes;
  size_t hash = 0;
  if (share) {
    hash = hash_of(data);
    auto [begin, end] = constants_by_hash_.equal_range(hash);
    for (auto it = begin; it != end; ++it) {
      if (value(it->second).constant.equals(data)) return it->second;
    }
  }
  if (value_name.empty()) value_name = "c";
  const ValueId id = add_value(std::move(value_name), data.dtype(), to_shape(data.dims()));
  value(id).kind = ValueKind::constant;
  value(id).known = known_contents(data);
  value(id).constant = std::move(data);
  if (share) constants_by_hash_.emplace(hash, id);
  return id;
}

ValueId Graph::find_value(std::string_view value_name) const {
  auto found = by_name_.find(std::string(value_name));
  return found == by_name_.end() ? kNoValue : found->second;
}

void Graph::rename_value(ValueId id, std::string value_name) {
  if (value(id).name == value_name) return;
  by_name_.erase(value(id).name);
  value(id).name = unique_name(std::move(value_name));
  by_name_.emplace(value(id).name, id);
}

NodeId Graph::add_node(Node node) {
  const NodeId id = static_cast<NodeId>(nodes_.size());
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    if (node.outputs[i] == kNoValue) continue;
    Value& output = value(node.outputs[i]);
    check(output.producer == kNoNode && output.kind == ValueKind::computed,
          "a value can have one producer only");
    output.producer = id;
    output.output_index = static_cast<int>(i);
  }
  nodes_.push_back(std::move(node));
  alive_.push_back(true);
  order_.push_back(id);
  return id;
}

void Graph::remove_node(NodeId id) {
  for (ValueId output : node(id).outputs) {
    if (output != kNoValue) value(output).producer = kNoNode;
  }
  alive_[static_cast<size_t>(id)] = false;
  std::erase(order_, id);
}

const GraphInput* Graph::find_input(ValueId id) const {
  for (const GraphInput& input : inputs_) {
    if (input.value == id) return &input;
  }
  return nullptr;
}

std::vector<std::vector<NodeId>> Graph::users() const {
  std::vector<std::vector<NodeId>> result(values_.size());
  for (NodeId id : order_) {
    for (ValueId input : node(id).inputs) {
      if (input != kNoValue) result[static_cast<size_t>(input)].push_back(id);
    }
  }
  return result;
}

void Graph::refuse_id(int64_t id, size_t count) {
  throw InternalError(str("the graph has ", count, " of these, none with the id ", id));
}

void Graph::replace_uses(ValueId from, ValueId to) {
  check(from != kNoValue, "what is absent has no uses");
  for (NodeId id : order_) {
    for (ValueId& input : node(id).inputs) {
      if (input == from) input = to;
    }
  }
  for (GraphOutput& output : outputs_) {
    if (output.value == from) output.value = to;
  }
}

void Graph::sort() {
  enum class Mark : uint8_t { fresh, open, done };
  std::vector<Mark> marks(nodes_.size(), Mark::fresh);
  std::vector<NodeId> sorted;
  sorted.reserve(order_.size());
  std::vector<std::pair<NodeId, size_t>> stack;  // node, next input to look at
  // Forward nodes first, so that every phase stays one contiguous run.
  std::vector<NodeId> roots = order_;
  std::ranges::stable_partition(roots, [&](NodeId id) { return node(id).phase == Phase::forward; });
  for (NodeId root : roots) {
    if (marks[static_cast<size_t>(root)] != Mark::fresh) continue;
    stack.emplace_back(root, 0);
    marks[static_cast<size_t>(root)] = Mark::open;
    while (!stack.empty()) {
      auto& [id, next] = stack.back();
      const Node& current = node(id);
      if (next == current.inputs.size()) {
        marks[static_cast<size_t>(id)] = Mark::done;
        sorted.push_back(id);
        stack.pop_back();
        continue;
      }
      const ValueId input = current.inputs[next++];
      if (input == kNoValue) continue;
      const NodeId producer = value(input).producer;
      if (producer == kNoNode) continue;
      Mark& mark = marks[static_cast<size_t>(producer)];
      if (mark == Mark::open) {
        throw InvalidModelError(
            str(context(current), "the graph has a cycle through '", value(input).name, "'"));
      }
      if (mark == Mark::fresh) {
        mark = Mark::open;
        stack.emplace_back(producer, 0);
      }
    }
  }
  order_ = std::move(sorted);
}

void Graph::reorder(std::vector<NodeId> order) {
  std::vector<NodeId> expected = order_, given = order;
  std::ranges::sort(expected);
  std::ranges::sort(given);
  if (expected != given) throw InvalidModelError("the order has other nodes than the graph");
  std::vector<bool> made(nodes_.size(), false);
  for (NodeId id : order) {
    for (ValueId input : node(id).inputs) {
      if (input == kNoValue || value(input).kind != ValueKind::computed) continue;
      if (!made[static_cast<size_t>(value(input).producer)]) {
        throw InvalidModelError(
            str(context(node(id)), "it stands before what makes '", value(input).name, "'"));
      }
    }
    made[static_cast<size_t>(id)] = true;
  }
  order_ = std::move(order);
}

int Graph::remove_dead_nodes() {
  std::vector<int> uses(values_.size(), 0);
  for (NodeId id : order_) {
    for (ValueId input : node(id).inputs) {
      if (input != kNoValue) ++uses[static_cast<size_t>(input)];
    }
  }
  for (const GraphOutput& output : outputs_) ++uses[static_cast<size_t>(output.value)];
  int removed = 0;
  std::vector<NodeId> kept;
  for (auto it = order_.rbegin(); it != order_.rend(); ++it) {
    Node& current = node(*it);
    const bool live = std::any_of(current.outputs.begin(), current.outputs.end(), [&](ValueId v) {
      return v != kNoValue && uses[static_cast<size_t>(v)] > 0;
    });
    if (live) {
      kept.push_back(*it);
      continue;
    }
    for (ValueId input : current.inputs) {
      if (input != kNoValue) --uses[static_cast<size_t>(input)];
    }
    for (ValueId output : current.outputs) {
      if (output != kNoValue) value(output).producer = kNoNode;
    }
    alive_[static_cast<size_t>(*it)] = false;
    ++removed;
  }
  std::reverse(kept.begin(), kept.end());
  order_ = std::move(kept);
  return removed;
}

std::string Graph::context(const Node& node) {
  const std::string prefix = node.domain.empty() ? "" : node.domain + "::";
  return node.name.empty() ? str("[", prefix, node.op, "] ")
                           : str("[", prefix, node.op, " '", node.name, "'] ");
}

}  // namespace ortrain
