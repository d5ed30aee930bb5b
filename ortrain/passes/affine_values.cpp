// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/affine_values.h"

#include <algorithm>

#include "ortrain/ir/attribute_reader.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain {
namespace {

// Far from what sums could leave int64 with: extents fit into 48 bits.
constexpr int64_t kMostSlope = int64_t{1} << 12;
constexpr size_t kMostConditions = 16;
constexpr int64_t kMostElements = 4096;  // of constants that are looked at

bool is_small(const AffineForm& form) {
  if (form.constant.is_constant()) {
    const int64_t value = form.constant.constant();
    if (value > int64_t{1} << 48 || value < -(int64_t{1} << 48)) return false;
  }
  return form.constant.weight() < 256 &&
         std::ranges::all_of(
             form.slopes,
             [](int64_t slope) { return slope <= kMostSlope && slope >= -kMostSlope; });
}

AffineForm sum(const AffineForm& a, const AffineForm& b, int64_t factor_of_b) {
  AffineForm result{a.constant + Dim(factor_of_b) * b.constant, a.slopes};
  for (size_t k = 0; k < result.slopes.size(); ++k) result.slopes[k] += factor_of_b * b.slopes[k];
  return result;
}

bool is_flat(const AffineForm& form) {
  return std::ranges::all_of(form.slopes, [](int64_t slope) { return slope == 0; });
}

bool same(const AffineForm& a, const AffineForm& b) {
  return a.constant == b.constant && a.slopes == b.slopes;
}

// constant + slopes times (0 or extent - 1), whichever `sign` wants.
std::optional<int64_t> extreme(const AffineForm& form, const Shape& shape, int sign) {
  Dim value = form.constant;
  for (size_t k = 0; k < form.slopes.size(); ++k) {
    if (form.slopes[k] * sign > 0) value = value + Dim(form.slopes[k]) * (shape[k] - Dim(1));
  }
  return value.is_constant() ? std::optional(value.constant()) : std::nullopt;
}

AttributeReader attributes_of(const Node& node) {
  return {op_registry().get(node.domain, node.op), node};
}

// Keeps what is not decided on the shape; a condition that never holds decides all.
void add_condition(Predicate& to, Condition condition, const Shape& shape) {
  if (condition.at_least_zero) {
    const auto least = least_of(*condition.at_least_zero, shape);
    if (least && *least >= 0) return;
    const auto most = most_of(*condition.at_least_zero, shape);
    if (most && *most < 0) {
      to.never = true;
      return;
    }
  }
  to.conditions.push_back(std::move(condition));
}

}  // namespace

std::optional<int64_t> least_of(const AffineForm& form, const Shape& shape) {
  return extreme(form, shape, -1);
}
std::optional<int64_t> most_of(const AffineForm& form, const Shape& shape) {
  return extreme(form, shape, 1);
}

AffineValues::AffineValues(const Graph& graph)
    : graph_(graph), forms_(graph.num_values()), predicates_(graph.num_values()) {
  for (ValueId id = 0; id < static_cast<ValueId>(graph.num_values()); ++id) visit_constant(id);
  for (NodeId id : graph.order()) visit(graph.node(id));
}

const AffineForm* AffineValues::form(ValueId id) const {
  if (id == kNoValue || static_cast<size_t>(id) >= forms_.size()) return nullptr;
  const auto& found = forms_[static_cast<size_t>(id)];
  return found ? &*found : nullptr;
}

const Predicate* AffineValues::predicate(ValueId id) const {
  if (id == kNoValue || static_cast<size_t>(id) >= predicates_.size()) return nullptr;
  const auto& found = predicates_[static_cast<size_t>(id)];
  return found ? &*found : nullptr;
}

void AffineValues::visit_constant(ValueId id) {
  const Value& value = graph_.value(id);
  if (value.kind != ValueKind::constant || !value.constant.defined()) return;
  const int64_t count = num_elements(value.constant.dims());
  if (count == 0 || count > kMostElements) return;
  if (value.dtype != DType::i64 && value.dtype != DType::boolean) return;
  const std::vector<int64_t> all = value.constant.to_int64s();
  if (!std::ranges::all_of(all, [&](int64_t each) { return each == all[0]; })) return;
  if (value.dtype == DType::i64) {
    AffineForm form{Dim(all[0]), std::vector<int64_t>(value.shape.size(), 0)};
    if (is_small(form)) forms_[static_cast<size_t>(id)] = std::move(form);
  } else {
    predicates_[static_cast<size_t>(id)] = Predicate{.never = all[0] == 0, .conditions = {}};
  }
}

void AffineValues::visit(const Node& node) {
  if (node.outputs.empty() || node.outputs[0] == kNoValue) return;
  const ValueId id = node.outputs[0];
  const Value& value = graph_.value(id);
  if (value.dtype == DType::i64) {
    std::optional<AffineForm> form;
    if (value.known && value.known->size() == 1 && value.shape.size() <= 1) {
      form = AffineForm{(*value.known)[0], std::vector<int64_t>(value.shape.size(), 0)};
    } else if (node.domain.empty()) {
      form = form_of(node);
    }
    if (form && is_small(*form)) forms_[static_cast<size_t>(id)] = std::move(form);
  } else if (value.dtype == DType::boolean) {
    std::optional<Predicate> found;
    if (node.domain.empty()) found = predicate_of(node);
    if (!found || found->conditions.size() > kMostConditions) {
      // Whatever it is, it is itself.
      found = Predicate{.never = false, .conditions = {{std::nullopt, id}}};
    }
    if (found->conditions.size() == 1 && found->conditions[0].source == kNoValue) {
      found->conditions[0].source = id;
    }
    predicates_[static_cast<size_t>(id)] = std::move(found);
  }
}

std::optional<AffineForm> AffineValues::input_form(const Node& node, size_t index) const {
  if (index >= node.inputs.size()) return std::nullopt;
  const AffineForm* found = form(node.inputs[index]);
  if (found == nullptr) return std::nullopt;
  return broadcast_form(*found, shape_of(node.inputs[index]), shape_of(node.outputs[0]));
}

std::optional<AffineForm> AffineValues::broadcast_form(const AffineForm& form, const Shape& from,
                                                       const Shape& to) const {
  if (from.size() > to.size()) return std::nullopt;
  AffineForm result{form.constant, std::vector<int64_t>(to.size(), 0)};
  const size_t ahead = to.size() - from.size();
  for (size_t k = 0; k < from.size(); ++k) {
    if (form.slopes[k] == 0 || from[k].is(1)) continue;  // the only coordinate there is 0
    if (!(from[k] == to[ahead + k])) return std::nullopt;
    result.slopes[ahead + k] = form.slopes[k];
  }
  return result;
}

std::optional<Predicate> AffineValues::input_predicate(const Node& node, size_t index,
                                                       const Shape& to) const {
  if (index >= node.inputs.size() || node.inputs[index] == kNoValue) return std::nullopt;
  const ValueId id = node.inputs[index];
  const Predicate* found = predicate(id);
  if (found == nullptr) {  // an input of the graph
    return Predicate{.never = false, .conditions = {{std::nullopt, id}}};
  }
  Predicate result{.never = found->never, .conditions = {}};
  for (const Condition& condition : found->conditions) {
    Condition moved{std::nullopt, condition.source};
    if (condition.at_least_zero) {
      moved.at_least_zero = broadcast_form(*condition.at_least_zero, shape_of(id), to);
    }
    if (!moved.at_least_zero && moved.source == kNoValue) return std::nullopt;
    add_condition(result, std::move(moved), to);
  }
  return result;
}

std::optional<std::vector<int64_t>> AffineValues::known_integers(const Node& node,
                                                                 size_t index) const {
  if (index >= node.inputs.size() || node.inputs[index] == kNoValue) return std::nullopt;
  const Value& value = graph_.value(node.inputs[index]);
  std::vector<int64_t> result;
  if (value.kind == ValueKind::constant && value.dtype == DType::i64 && value.constant.defined()) {
    if (num_elements(value.constant.dims()) > kMostElements) return std::nullopt;
    return value.constant.to_int64s();
  }
  if (!value.known) return std::nullopt;
  for (const Dim& each : *value.known) {
    if (!each.is_constant()) return std::nullopt;
    result.push_back(each.constant());
  }
  return result;
}

std::optional<AffineForm> AffineValues::form_of(const Node& node) const {
  const Shape& shape = shape_of(node.outputs[0]);
  if (node.op == "Range") {
    const AffineForm* start = form(node.inputs[0]);
    const AffineForm* step = form(node.inputs[2]);
    if (start == nullptr || step == nullptr || !step->constant.is_constant()) return std::nullopt;
    return AffineForm{start->constant, {step->constant.constant()}};
  }
  if (node.op == "Add" || node.op == "Sub" || node.op == "Mul") {
    const auto a = input_form(node, 0), b = input_form(node, 1);
    if (!a || !b) return std::nullopt;
    if (node.op != "Mul") return sum(*a, *b, node.op == "Add" ? 1 : -1);
    const bool first = is_flat(*a) && a->constant.is_constant();
    const AffineForm& factor = first ? *a : *b;
    if (!is_flat(factor) || !factor.constant.is_constant()) return std::nullopt;
    const int64_t by = factor.constant.constant();
    if (by > kMostSlope || by < -kMostSlope) return std::nullopt;
    const AffineForm none{Dim(0), std::vector<int64_t>(shape.size(), 0)};
    return sum(none, first ? *b : *a, by);
  }
  if (node.op == "Identity" || node.op == "Expand") return input_form(node, 0);
  if (node.op == "Cast") {
    if (const AffineForm* same_type = form(node.inputs[0])) return *same_type;
    const Predicate* truth = predicate(node.inputs[0]);
    if (truth == nullptr || (!truth->never && !truth->conditions.empty())) return std::nullopt;
    return AffineForm{Dim(truth->never ? 0 : 1), std::vector<int64_t>(shape.size(), 0)};
  }
  if (node.op == "Unsqueeze" || node.op == "Squeeze") {
    const AffineForm* from = form(node.inputs[0]);
    const bool adds = node.op == "Unsqueeze";
    const Shape& other = adds ? shape : shape_of(node.inputs[0]);
    auto axes = known_integers(node, 1);
    if (from == nullptr || !axes) return std::nullopt;
    for (int64_t& axis : *axes) axis = normalize_axis(axis, other.size());
    AffineForm result{from->constant, {}};
    size_t next = 0;  // of the form's axes
    for (size_t k = 0; k < other.size(); ++k) {
      const bool named = std::ranges::find(*axes, static_cast<int64_t>(k)) != axes->end();
      if (adds) {
        result.slopes.push_back(named ? 0 : from->slopes[next++]);
      } else if (!named) {
        result.slopes.push_back(from->slopes[k]);
      }
    }
    return result;
  }
  if (node.op == "CumSum") {
    const AffineForm* of = form(node.inputs[0]);
    const auto axis = known_integers(node, 1);
    if (of == nullptr || !is_flat(*of) || !of->constant.is_constant() || !axis) return std::nullopt;
    const int64_t each = of->constant.constant();
    if (each > kMostSlope || each < -kMostSlope) return std::nullopt;
    AffineForm result{Dim(each), of->slopes};
    if (each == 0) return result;
    if (attributes_of(node).int_("exclusive") != 0 || attributes_of(node).int_("reverse") != 0)
      return std::nullopt;
    result.slopes[static_cast<size_t>(normalize_axis(axis->at(0), shape.size()))] = each;
    return result;
  }
  if (node.op == "Slice") return sliced(node);
  if (node.op == "Concat") return concatenation(node);
  if (node.op == "GatherND") return gathered(node);
  return std::nullopt;
}

std::optional<AffineForm> AffineValues::sliced(const Node& node) const {
  const AffineForm* from = form(node.inputs[0]);
  const auto starts = known_integers(node, 1);
  if (from == nullptr || !starts) return std::nullopt;
  AffineForm result = *from;
  std::vector<int64_t> axes(starts->size()), steps(starts->size(), 1);
  for (size_t i = 0; i < axes.size(); ++i) axes[i] = static_cast<int64_t>(i);
  if (node.inputs.size() > 3 && node.inputs[3] != kNoValue) {
    const auto given = known_integers(node, 3);
    if (!given || given->size() != axes.size()) return std::nullopt;
    axes = *given;
  }
  if (node.inputs.size() > 4 && node.inputs[4] != kNoValue) {
    const auto given = known_integers(node, 4);
    if (!given || given->size() != axes.size()) return std::nullopt;
    steps = *given;
  }
  for (size_t i = 0; i < axes.size(); ++i) {
    // Where a start is behind the end, nothing is taken. What counts from the end is cut at 0 by
    // tensors that are too short.
    if ((*starts)[i] < 0 || (*starts)[i] > kMostElements || steps[i] < 1 || steps[i] > kMostSlope) {
      return std::nullopt;
    }
    const auto axis = static_cast<size_t>(normalize_axis(axes[i], result.slopes.size()));
    result.constant = result.constant + Dim(result.slopes[axis]) * Dim((*starts)[i]);
    result.slopes[axis] *= steps[i];
  }
  return result;
}

std::optional<AffineForm> AffineValues::concatenation(const Node& node) const {
  const auto axis = static_cast<size_t>(
      normalize_axis(attributes_of(node).int_("axis"), shape_of(node.outputs[0]).size()));
  std::optional<AffineForm> whole;
  // First those parts that tell how the elements grow along the axis, then single elements.
  for (const bool single : {false, true}) {
    Dim before(0);
    for (ValueId input : node.inputs) {
      const AffineForm* part = form(input);
      if (part == nullptr) return std::nullopt;
      const Dim& extent = shape_of(input)[axis];
      if (extent.is(1) == single) {
        AffineForm moved = *part;
        if (single) moved.slopes[axis] = whole ? whole->slopes[axis] : 0;
        moved.constant = moved.constant - Dim(moved.slopes[axis]) * before;
        if (whole && !same(*whole, moved)) return std::nullopt;
        whole = std::move(moved);
      }
      before = before + extent;
    }
  }
  return whole;
}

std::optional<AffineForm> AffineValues::gathered(const Node& node) const {
  const AffineForm* data = form(node.inputs[0]);
  if (data == nullptr || attributes_of(node).int_("batch_dims") != 0) return std::nullopt;
  const Shape& from = shape_of(node.inputs[0]);
  const Shape& shape = shape_of(node.outputs[0]);
  const NodeId maker = graph_.value(node.inputs[1]).producer;
  if (maker == kNoNode) return std::nullopt;
  const Node& concat = graph_.node(maker);
  const Shape& indices = shape_of(node.inputs[1]);
  const bool joins = concat.op == "Concat" && concat.domain.empty() && !indices.empty() &&
                     normalize_axis(attributes_of(concat).int_("axis"), indices.size()) + 1 ==
                         static_cast<int64_t>(indices.size());
  if (!joins || concat.inputs.size() != from.size()) return std::nullopt;
  AffineForm result{data->constant, std::vector<int64_t>(shape.size(), 0)};
  for (size_t k = 0; k < from.size(); ++k) {
    const AffineForm* index = form(concat.inputs[k]);
    if (index == nullptr || !shape_of(concat.inputs[k]).back().is(1)) return std::nullopt;
    AffineForm at{index->constant, index->slopes};
    at.slopes.pop_back();
    if (at.slopes.size() != shape.size()) return std::nullopt;
    // Within the extent: none counts from the end, none is an error.
    const auto least = least_of(at, shape);
    AffineForm room{from[k] - Dim(1) - at.constant, at.slopes};
    for (int64_t& slope : room.slopes) slope = -slope;
    const auto left = least_of(room, shape);
    if (!least || *least < 0 || !left || *left < 0) return std::nullopt;
    result = sum(result, at, data->slopes[k]);
  }
  return result;
}

std::optional<Predicate> AffineValues::comparison(const Node& node) const {
  const auto a = input_form(node, 0), b = input_form(node, 1);
  if (!a || !b) return std::nullopt;
  const Shape& shape = shape_of(node.outputs[0]);
  Predicate result;
  if (node.op == "Equal") {
    const AffineForm apart = sum(*a, *b, -1);
    if (is_flat(apart) && apart.constant.is(0)) return result;
    const auto least = least_of(apart, shape), most = most_of(apart, shape);
    if ((!least || *least <= 0) && (!most || *most >= 0)) return std::nullopt;
    result.never = true;
    return result;
  }
  const bool less = node.op == "Less" || node.op == "LessOrEqual";
  AffineForm apart = less ? sum(*b, *a, -1) : sum(*a, *b, -1);
  if (node.op == "Less" || node.op == "Greater") apart.constant = apart.constant - Dim(1);
  add_condition(result, {std::move(apart), node.outputs[0]}, shape);
  return result;
}

std::optional<Predicate> AffineValues::predicate_of(const Node& node) const {
  const Shape& shape = shape_of(node.outputs[0]);
  if (node.op == "Equal" || node.op == "Less" || node.op == "LessOrEqual" || node.op == "Greater" ||
      node.op == "GreaterOrEqual") {
    return comparison(node);
  }
  if (node.op == "And") {
    auto result = input_predicate(node, 0, shape);
    const auto other = input_predicate(node, 1, shape);
    if (!result || !other) return std::nullopt;
    result->never |= other->never;
    for (const Condition& condition : other->conditions) result->conditions.push_back(condition);
    return result;
  }
  if (node.op == "Not") {
    auto result = input_predicate(node, 0, shape);
    if (!result) return std::nullopt;
    if (result->never) return Predicate{};
    if (result->conditions.empty()) return Predicate{.never = true, .conditions = {}};
    if (result->conditions.size() > 1 || !result->conditions[0].at_least_zero) return std::nullopt;
    const AffineForm none{Dim(-1), std::vector<int64_t>(shape.size(), 0)};
    Predicate negated;
    add_condition(negated, {sum(none, *result->conditions[0].at_least_zero, -1), node.outputs[0]},
                  shape);
    return negated;
  }
  if (node.op == "Identity" || node.op == "Expand") return input_predicate(node, 0, shape);
  if (node.op == "Unsqueeze") {
    // Truth alone: what a condition reads has another rank.
    const Predicate* from = predicate(node.inputs[0]);
    if (from != nullptr && (from->never || from->conditions.empty())) {
      return Predicate{.never = from->never, .conditions = {}};
    }
  }
  return std::nullopt;
}

}  // namespace ortrain
