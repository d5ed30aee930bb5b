// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "ortrain/ir/graph.h"

namespace ortrain {

// The elements of an integer tensor as a function of where they stand: constant + sum of slopes[k]
// times the coordinate along axis k.
struct AffineForm {
  Dim constant;
  std::vector<int64_t> slopes;  // one per axis
};

// One of several conditions that all have to hold for an element of a boolean tensor.
struct Condition {
  // Holds where this is 0 or more; without it only `source` says so.
  std::optional<AffineForm> at_least_zero;
  // A boolean value, broadcast from the right to the tensor, that is true exactly where this holds;
  // kNoValue where the graph has none.
  ValueId source = kNoValue;
};

// A boolean tensor: true where all conditions hold, all of it without any.
struct Predicate {
  bool never = false;  // false everywhere
  std::vector<Condition> conditions;
};

// Which integer tensors of a graph are affine in their coordinates, and what booleans are computed
// from these: positions and masks that are made of Range, shapes and comparisons. Holds for all
// extents that symbols may stand for. Forms are known for int64 alone, whose sums of extents cannot
// leave the type.
class AffineValues {
 public:
  explicit AffineValues(const Graph& graph);

  // Null where nothing is known; valid as long as this is.
  const AffineForm* form(ValueId id) const;
  const Predicate* predicate(ValueId id) const;

 private:
  void visit_constant(ValueId id);
  void visit(const Node& node);
  std::optional<AffineForm> form_of(const Node& node) const;
  std::optional<Predicate> predicate_of(const Node& node) const;
  std::optional<Predicate> comparison(const Node& node) const;
  std::optional<AffineForm> concatenation(const Node& node) const;
  std::optional<AffineForm> gathered(const Node& node) const;
  std::optional<AffineForm> sliced(const Node& node) const;

  // The same elements, broadcast to another shape.
  std::optional<AffineForm> broadcast_form(const AffineForm& form, const Shape& from,
                                           const Shape& to) const;
  std::optional<AffineForm> input_form(const Node& node, size_t index) const;
  std::optional<Predicate> input_predicate(const Node& node, size_t index, const Shape& to) const;
  std::optional<std::vector<int64_t>> known_integers(const Node& node, size_t index) const;
  const Shape& shape_of(ValueId id) const { return graph_.value(id).shape; }

  const Graph& graph_;
  std::vector<std::optional<AffineForm>> forms_;      // by ValueId
  std::vector<std::optional<Predicate>> predicates_;  // by ValueId
};

// The least and the most that a form can be on a shape; null where symbols leave it open.
std::optional<int64_t> least_of(const AffineForm& form, const Shape& shape);
std::optional<int64_t> most_of(const AffineForm& form, const Shape& shape);

}  // namespace ortrain
