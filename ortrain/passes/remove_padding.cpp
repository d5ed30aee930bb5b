// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/remove_padding.h"

#include <algorithm>
#include <map>
#include <set>

#include "ortrain/base/error.h"
#include "ortrain/ir/attribute_reader.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain {
namespace {

constexpr size_t kMaskInput = 3;
constexpr size_t kOffsetsInput = 5;

bool is_attention(const Node& node) {
  return node.op == "Attention" && node.domain == kOrtrainDomain;
}

// How a value holds one row per batch entry and position.
enum class Layout {
  none,
  apart,   // [batch, length, ...]
  merged,  // [batch * length, ...]
};

class Removal {
 public:
  Removal(const Graph& graph, bool causal) : graph_(graph), causal_(causal) {}

  std::optional<PaddingRemoval> run() {
    if (!find_extents()) return std::nullopt;
    find_members();
    if (masks_.empty() || !build_masks()) return std::nullopt;
    build_packed();
    return std::move(result_);
  }

 private:
  bool has(NodeId id) const { return members_[static_cast<size_t>(id)]; }

  Layout layout_of(ValueId id) const {
    const Shape& shape = graph_.value(id).shape;
    if (shape.size() >= 2 && shape[0] == batch_ && shape[1] == length_) return Layout::apart;
    if (!shape.empty() && shape[0] == rows_) return Layout::merged;
    return Layout::none;
  }

  static size_t num_row_axes(Layout layout) { return layout == Layout::apart ? 2 : 1; }

  bool has_constant_columns(ValueId id) const {
    const Shape& shape = graph_.value(id).shape;
    const size_t axes = num_row_axes(layout_of(id));
    return std::all_of(shape.begin() + static_cast<std::ptrdiff_t>(axes), shape.end(),
                       [](const Dim& dim) { return dim.is_constant() && !dim.is(0); });
  }

  bool depends_on_rows(ValueId id) const {
    std::set<std::string> row_symbols = batch_.symbols();
    row_symbols.merge(length_.symbols());
    for (const Dim& dim : graph_.value(id).shape) {
      for (const std::string& symbol : dim.symbols()) {
        if (row_symbols.count(symbol) != 0) return true;
      }
    }
    return false;
  }

  // Batch and length of the first masked attention, and where a call tells them.
  bool find_extents() {
    for (NodeId id : graph_.order()) {
      const Node& node = graph_.node(id);
      if (!is_attention(node) || node.inputs.size() <= kMaskInput) continue;
      const Shape& shape = graph_.value(node.inputs[0]).shape;
      if (node.inputs[kMaskInput] == kNoValue || shape.size() != 3) continue;
      batch_ = shape[0];
      length_ = shape[1];
      rows_ = batch_ * length_;
      // Extents that are numbers could be those of weights.
      if (batch_.is_constant() || length_.is_constant() || batch_ == length_) return false;
      return find_extent(batch_, result_.batch) && find_extent(length_, result_.length);
    }
    return false;
  }

  bool find_extent(const Dim& extent, PaddingRemoval::Extent& where) const {
    for (size_t i = 0; i < graph_.inputs().size(); ++i) {
      if (graph_.inputs()[i].role != InputRole::user) continue;
      const Shape& shape = graph_.value(graph_.inputs()[i].value).shape;
      for (size_t axis = 0; axis < shape.size(); ++axis) {
        if (shape[axis] == extent) {
          where = {i, axis};
          return true;
        }
      }
    }
    return false;
  }

  // The largest set of nodes that work row by row and whose rows nobody else reads, attention among
  // them.
  void find_members() {
    members_.assign(graph_.num_node_slots(), false);
    for (NodeId id : graph_.order()) {
      members_[static_cast<size_t>(id)] = works_by_row(graph_.node(id));
    }
    std::set<ValueId> visible;
    for (const GraphOutput& output : graph_.outputs()) visible.insert(output.value);
    const std::vector<std::vector<NodeId>> users = graph_.users();
    const std::vector<NodeId>& order = graph_.order();
    for (auto id = order.rbegin(); id != order.rend(); ++id) {
      if (!has(*id)) continue;
      for (ValueId output : graph_.node(*id).outputs) {
        if (output == kNoValue) continue;
        const auto& readers = users[static_cast<size_t>(output)];
        const bool hidden = visible.count(output) == 0 &&
                            std::all_of(readers.begin(), readers.end(), [&](NodeId user) {
                              return has(user) || picks_one_row(user, output);
                            });
        if (!hidden) members_[static_cast<size_t>(*id)] = false;
      }
    }
    for (NodeId id : graph_.order()) {
      const Node& node = graph_.node(id);
      if (!has(id) || !is_attention(node)) continue;
      const ValueId mask = node.inputs[kMaskInput];
      if (std::find(masks_.begin(), masks_.end(), mask) == masks_.end()) masks_.push_back(mask);
    }
  }

  bool works_by_row(const Node& node) const {
    if (node.phase != Phase::forward || node.outputs.empty() || node.outputs[0] == kNoValue) {
      return false;
    }
    const Layout layout = layout_of(node.outputs[0]);
    if (layout == Layout::none) return false;
    if (is_attention(node)) return attends_within_sequences(node);
    if (node.op == "Reshape" && node.domain.empty()) {
      return layout_of(node.inputs[0]) != Layout::none && has_constant_columns(node.inputs[0]) &&
             has_constant_columns(node.outputs[0]);
    }
    const OpDef& def = op_registry().get(node.domain, node.op);
    if (def.expression) return broadcasts_to_rows(node, layout);
    if (def.row_operand < 0) return false;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      if (node.inputs[i] == kNoValue) continue;
      if (i == static_cast<size_t>(def.row_operand)) {
        if (layout_of(node.inputs[i]) != layout || !has_constant_columns(node.inputs[i])) {
          return false;
        }
      } else if (depends_on_rows(node.inputs[i])) {
        return false;
      }
    }
    for (ValueId output : node.outputs) {
      if (output != kNoValue && layout_of(output) != layout) return false;
    }
    const FormalAttribute* axis = def.find_attribute("axis");
    if (axis == nullptr) return true;
    const AttributeReader attrs(def, node);
    const size_t rank =
        graph_.value(node.inputs[static_cast<size_t>(def.row_operand)]).shape.size();
    return normalize_axis(attrs.int_("axis"), rank) >= static_cast<int64_t>(num_row_axes(layout));
  }

  bool attends_within_sequences(const Node& node) const {
    if (node.inputs.size() <= kMaskInput || node.inputs[kMaskInput] == kNoValue) return false;
    if (node.inputs.size() > kOffsetsInput && node.inputs[kOffsetsInput] != kNoValue) return false;
    for (size_t i = 0; i < 3; ++i) {
      const Shape& shape = graph_.value(node.inputs[i]).shape;
      if (shape.size() != 3 || layout_of(node.inputs[i]) != Layout::apart ||
          !has_constant_columns(node.inputs[i])) {
        return false;
      }
    }
    const Shape& mask = graph_.value(node.inputs[kMaskInput]).shape;
    const auto is_one_or = [](const Dim& dim, const Dim& other) {
      return dim.is(1) || dim == other;
    };
    // One mask for all heads.
    return mask.size() == 4 && is_one_or(mask[0], batch_) && mask[1].is(1) &&
           is_one_or(mask[2], length_) && mask[3] == length_;
  }

  // An operand of an elementwise node, seen along the rows of the result.
  enum class Operand { rows, same, per_column, per_sequence, unknown };

  Operand operand_kind(ValueId id, const Node& node, Layout layout) const {
    if (layout_of(id) == layout &&
        graph_.value(id).shape.size() == graph_.value(node.outputs[0]).shape.size()) {
      return has_constant_columns(id) ? Operand::rows : Operand::unknown;
    }
    const Shape& shape = graph_.value(id).shape;
    const size_t rank = graph_.value(node.outputs[0]).shape.size();
    const size_t axes = num_row_axes(layout);
    if (shape.size() + axes <= rank) return Operand::same;
    const size_t first = rank - shape.size();  // the result's axis that the operand begins with
    const auto extent = [&](size_t axis) { return axis < first ? Dim(1) : shape[axis - first]; };
    if (layout == Layout::merged) return extent(0).is(1) ? Operand::same : Operand::unknown;
    if (extent(0).is(1) && extent(1).is(1)) return Operand::same;
    if (extent(0).is(1) && extent(1) == length_) return Operand::per_column;
    if (extent(0) == batch_ && extent(1).is(1)) return Operand::per_sequence;
    return Operand::unknown;
  }

  bool broadcasts_to_rows(const Node& node, Layout layout) const {
    return std::all_of(node.inputs.begin(), node.inputs.end(), [&](ValueId id) {
      return id == kNoValue || operand_kind(id, node, layout) != Operand::unknown;
    });
  }

  // Gather of one position of every sequence.
  bool picks_one_row(NodeId id, ValueId data) const {
    const Node& node = graph_.node(id);
    if (node.op != "Gather" || !node.domain.empty() || node.inputs[0] != data) return false;
    if (layout_of(data) != Layout::apart || !has_constant_columns(data)) return false;
    const Value& index = graph_.value(node.inputs[1]);
    if (index.kind != ValueKind::constant || !index.shape.empty() || index.dtype != DType::i64) {
      return false;
    }
    const AttributeReader attrs(op_registry().get(node.domain, node.op), node);
    return normalize_axis(attrs.int_("axis"), graph_.value(data).shape.size()) == 1 &&
           picked_position(node) >= 0;
  }

  int64_t picked_position(const Node& node) const {
    return graph_.value(node.inputs[1]).constant.to_int64s()[0];
  }

  // --- what computes the masks

  bool build_masks() {
    Graph& made = result_.masks = graph_;
    made.outputs().clear();
    for (size_t i = 0; i < masks_.size(); ++i) {
      made.add_output({.value = masks_[i], .name = str("mask.", i), .role = OutputRole::user});
    }
    made.remove_dead_nodes();
    const std::vector<std::vector<NodeId>> users = made.users();
    for (NodeId id : made.order()) {
      if (op_registry().get(made.node(id).domain, made.node(id).op).draws_random_numbers) {
        return false;
      }
    }
    std::vector<GraphInput> needed;
    for (size_t i = 0; i < made.inputs().size(); ++i) {
      const GraphInput& input = made.inputs()[i];
      const bool is_mask = std::find(masks_.begin(), masks_.end(), input.value) != masks_.end();
      if (users[static_cast<size_t>(input.value)].empty() && !is_mask) continue;
      if (input.requires_grad) return false;
      result_.mask_inputs.push_back(i);
      needed.push_back(input);
    }
    made.inputs() = std::move(needed);
    return true;
  }

  // --- the packed graph

  void build_packed() {
    result_.packed = graph_;
    Graph& graph = result_.packed;
    const Dim rows = Dim::symbol("packed_rows");
    const auto derived = [&](const std::string& name, const Dim& extent) {
      return graph.add_input({.role = InputRole::derived}, "packing." + name, DType::i64, {extent});
    };
    positions_ = derived("positions", rows);
    columns_ = derived("columns", rows);
    sequences_ = derived("sequences", rows);
    offsets_ = derived("offsets", batch_ + 1);
    GraphBuilder builder(graph);
    const std::vector<NodeId> order = graph.order();
    for (NodeId id : order) {
      if (has(id)) rebuild(builder, id);
    }
    for (NodeId id : order) {
      if (!has(id)) rebuild_reader(builder, id, derived);
    }
    graph.sort();
    graph.remove_dead_nodes();
  }

  void rebuild(GraphBuilder& builder, NodeId id) {
    const Node node = graph_.node(id);
    builder.set_layer(node.name);
    builder.set_checkpoint(node.checkpoint);
    const Layout layout = layout_of(node.outputs[0]);
    if (node.op == "Reshape" && node.domain.empty()) {
      packed_[node.outputs[0]] = reshape_rows(builder, packed(builder, node.inputs[0]),
                                              graph_.value(node.outputs[0]).shape, layout);
      return;
    }
    const OpDef& def = op_registry().get(node.domain, node.op);
    std::vector<ValueId> inputs = node.inputs;
    Attributes attributes = node.attributes;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i] == kNoValue) continue;
      if (is_attention(node)) {
        if (i < 3) inputs[i] = packed(builder, inputs[i]);
      } else if (def.expression) {
        inputs[i] = packed_operand(builder, inputs[i], operand_kind(inputs[i], node, layout));
      } else if (i == static_cast<size_t>(def.row_operand)) {
        inputs[i] = packed(builder, inputs[i]);
      }
    }
    if (is_attention(node)) {
      inputs.resize(kOffsetsInput + 1, kNoValue);
      inputs[kMaskInput] = kNoValue;
      inputs[kOffsetsInput] = offsets_;
      if (causal_) attributes["is_causal"] = int64_t{1};
    }
    std::vector<bool> wanted;
    for (ValueId output : node.outputs) wanted.push_back(output != kNoValue);
    const std::vector<ValueId> made =
        builder.node(node.domain, node.op, std::move(inputs), std::move(attributes), wanted);
    for (size_t i = 0; i < made.size(); ++i) {
      if (made[i] != kNoValue) packed_[node.outputs[i]] = made[i];
    }
  }

  // The rows of a value that are kept: made by a member, or gathered.
  ValueId packed(GraphBuilder& builder, ValueId id) {
    if (auto found = packed_.find(id); found != packed_.end()) return found->second;
    const Shape shape = graph_.value(id).shape;
    const Layout layout = layout_of(id);
    ValueId rows = id;
    if (layout == Layout::apart) rows = reshape_rows(builder, id, shape, Layout::merged, 2);
    rows = builder.op("Gather", {rows, positions_}, {{"axis", int64_t{0}}});
    if (layout == Layout::apart) rows = reshape_rows(builder, rows, shape, Layout::apart, 2);
    return packed_[id] = rows;
  }

  // `value` with the columns of `shape` behind its rows, as [1, rows, ...] or [rows, ...].
  ValueId reshape_rows(GraphBuilder& builder, ValueId value, const Shape& shape, Layout to,
                       size_t row_axes = 0) const {
    std::vector<int64_t> extents;
    if (to == Layout::apart) extents.push_back(1);
    extents.push_back(-1);
    for (size_t i = row_axes == 0 ? num_row_axes(to) : row_axes; i < shape.size(); ++i) {
      extents.push_back(shape[i].constant());
    }
    return builder.reshape(value, extents);
  }

  ValueId packed_operand(GraphBuilder& builder, ValueId id, Operand kind) {
    switch (kind) {
      case Operand::rows:
        return packed(builder, id);
      case Operand::per_column: {
        // The axis of the positions is the last but the columns: axis 1, or 0 of a smaller rank.
        const Shape& shape = graph_.value(id).shape;
        const auto axis = std::find(shape.begin(), shape.end(), length_) - shape.begin();
        return builder.op("Gather", {id, columns_}, {{"axis", static_cast<int64_t>(axis)}});
      }
      case Operand::per_sequence: {
        const ValueId rows = builder.op("Gather", {id, sequences_}, {{"axis", int64_t{0}}});
        return builder.transpose(rows, swap_first_two(graph_.value(id).shape.size()));
      }
      case Operand::same:
      case Operand::unknown:
        break;
    }
    return id;
  }

  static std::vector<int64_t> swap_first_two(size_t rank) {
    std::vector<int64_t> perm(rank);
    for (size_t i = 0; i < rank; ++i) perm[i] = static_cast<int64_t>(i);
    std::swap(perm[0], perm[1]);
    return perm;
  }

  template <class AddInput>
  void rebuild_reader(GraphBuilder& builder, NodeId id, const AddInput& derived) {
    const Node node = graph_.node(id);
    if (node.inputs.empty() || packed_.count(node.inputs[0]) == 0 ||
        !picks_one_row(id, node.inputs[0])) {
      return;
    }
    const int64_t position = picked_position(node);
    auto [found, is_first] = picks_.try_emplace(position, kNoValue);
    if (is_first) {
      found->second = derived(str("picked.", position), batch_);
      result_.picked.push_back(position);
    }
    builder.set_layer(node.name);
    builder.set_checkpoint(node.checkpoint);
    const Shape& shape = graph_.value(node.inputs[0]).shape;
    const ValueId rows =
        reshape_rows(builder, packed_.at(node.inputs[0]), shape, Layout::merged, 2);
    const ValueId made = builder.op("Gather", {rows, found->second}, {{"axis", int64_t{0}}});
    result_.packed.replace_uses(node.outputs[0], made);
  }

  const Graph& graph_;
  const bool causal_;
  PaddingRemoval result_;
  Dim batch_, length_, rows_;
  std::vector<bool> members_;
  std::vector<ValueId> masks_;
  std::map<ValueId, ValueId> packed_;
  std::map<int64_t, ValueId> picks_;
  ValueId positions_ = kNoValue, columns_ = kNoValue, sequences_ = kNoValue, offsets_ = kNoValue;
};

}  // namespace

std::optional<PaddingRemoval> remove_padding(const Graph& graph, bool causal) {
  return Removal(graph, causal).run();
}

}  // namespace ortrain
