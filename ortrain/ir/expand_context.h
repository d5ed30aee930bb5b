// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ortrain/ir/attribute_reader.h"
#include "ortrain/ir/graph_builder.h"

namespace ortrain {

// The view of one node that an OpDef::expand gets: a builder for what the node stands for, and the
// node's inputs and attributes.
//
//   std::vector<ValueId> expand_swish(ExpandContext& e) {
//     return {e.mul(e.input(0), e.unary("Sigmoid", e.mul(e.input(0), e.attrs().float_("alpha"))))};
//   }
class ExpandContext : public GraphBuilder {
 public:
  ExpandContext(Graph& graph, const OpDef& def, const Node& node);

  AttributeReader attrs() const { return AttributeReader(*def_, *node_); }

  size_t num_inputs() const { return node_->inputs.size(); }
  bool has_input(size_t index) const;
  ValueId input(size_t index) const;  // kNoValue when absent
  bool wants_output(size_t index) const;
  size_t num_outputs() const { return node_->outputs.size(); }  // listed, wanted or not

  // Extents of a value that must be known now. UnsupportedError naming `what` otherwise.
  int64_t known_extent(ValueId value, size_t axis, const char* what) const;
  // Contents of an integer or boolean input that must be known now, row-major.
  std::vector<int64_t> known_ints(size_t index) const;

  // Throws UnsupportedError naming `what` where a form would be written out for each of more than
  // 1024: a file of a few bytes may declare any extent.
  static void check_listed(int64_t count, const char* what);

  // --- what many operators need
  ValueId slice(ValueId a, int64_t axis, int64_t begin, int64_t end);  // `end` as in ONNX Slice
  ValueId concat(std::vector<ValueId> parts, int64_t axis);            // one part: itself
  ValueId reduce(std::string_view op, ValueId a, const std::vector<int64_t>& axes, bool keepdims);
  // The extent of an axis as an int64 scalar of rank 1; a constant when it is known.
  ValueId extent_of(ValueId a, int64_t axis);
  // 0, 1, ... along an axis, int64 of rank 1.
  ValueId positions(ValueId a, int64_t axis);

 private:
  const Dim& dim_of(ValueId a, int64_t axis) const;

  const OpDef* def_;
  const Node* node_;
};

// Contents of an integer or boolean value where they are known, row-major.
std::optional<std::vector<int64_t>> known_integers(const Value& value);

// Adds to the graph what a node of an operator with `expand` stands for. Returns one value per
// output of the node, kNoValue for those that nobody wants. Arity, types and attributes are checked
// as for any node, and errors framed in the same way.
std::vector<ValueId> expand_node(Graph& graph, const OpDef& def, const Node& node);
// The same by OpDef::standard_form.
std::vector<ValueId> standard_form_of(Graph& graph, const OpDef& def, const Node& node);

}  // namespace ortrain
