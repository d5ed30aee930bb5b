// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ortrain/ir/attribute_reader.h"
#include "ortrain/ir/graph.h"

namespace ortrain {

// What is known about a value while shapes are inferred.
struct InferredValue {
  DType dtype = DType::undefined;  // undefined: absent
  Shape shape;
  // Contents of integer tensors of rank 0 or 1, when known.
  std::optional<std::vector<Dim>> known;
  // All contents of a constant of the graph, of any type (scales of Resize); otherwise undefined.
  TensorData constant;
};

// Contents longer than this are no shape arithmetic any more.
inline constexpr size_t kMaxKnown = 64;

// The view of one node that an OpDef::infer gets. Errors thrown inside get the node's frame added.
class InferContext {
 public:
  InferContext(const OpDef& def, const Node& node, std::vector<InferredValue> inputs);

  const Node& node() const { return *node_; }
  AttributeReader attrs() const { return AttributeReader(*def_, *node_); }

  size_t num_inputs() const { return inputs_.size(); }
  bool has_input(size_t index) const;
  DType dtype(size_t index) const;
  const Shape& shape(size_t index) const;
  int64_t rank(size_t index) const { return static_cast<int64_t>(shape(index).size()); }
  // Known contents of an integer input of rank 0 or 1.
  const std::optional<std::vector<Dim>>& known(size_t index) const;
  // Known contents that must be plain integers; nullopt if unknown or symbolic.
  std::optional<std::vector<int64_t>> known_ints(size_t index) const;

  // The contents of a constant input of any type; undefined when it is no constant.
  const TensorData& constant(size_t index) const;

  // Its name in the operator's definition.
  const std::string& input_name(size_t index) const;

  size_t num_outputs() const { return outputs_.size(); }
  bool wants_output(size_t index) const;
  void set_output(size_t index, DType dtype, Shape shape);
  // For integer outputs of rank 0 or 1. infer_node() drops contents of another number than the
  // output has elements, and such that its type does not hold.
  void set_known(size_t index, std::vector<Dim> known);
  // A fresh symbol for an extent that only the data tell, e.g. "<name of output>.d<axis>".
  Dim unknown_extent(size_t output, size_t axis) const;

  const std::vector<InferredValue>& outputs() const { return outputs_; }

 private:
  const OpDef* def_;
  const Node* node_;
  std::vector<InferredValue> inputs_;
  std::vector<InferredValue> outputs_;
};

// Checks arity, types and attributes of the node against the schema. Every error is framed with op
// and layer name.
void check_node(const OpDef& def, const Node& node, const std::vector<InferredValue>& inputs);

// Checks the node, runs `infer`, and returns one
// entry per output of the node. Every error is framed with op and layer name.
std::vector<InferredValue> infer_node(const OpDef& def, const Node& node,
                                      std::vector<InferredValue> inputs);

// Ready-made inference functions.
void infer_same_as_input(InferContext& context);   // every output like input 0
void infer_broadcast(InferContext& context);       // dtype of input 0, all inputs broadcast
void infer_broadcast_bool(InferContext& context);  // the same, bool result

}  // namespace ortrain
