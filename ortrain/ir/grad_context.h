// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "ortrain/ir/attribute_reader.h"
#include "ortrain/ir/graph_builder.h"

namespace ortrain {

// The view of one forward node that an OpDef::gradient gets: a builder whose nodes join the
// backward phase, and handles to what the node read, made, and what gradients came in.
//
//   void tanh_gradient(GradContext& g) {
//     ValueId y = g.output(0);
//     g.set_input_grad(0, g.own("TanhGrad", {g.output_grad(0), y}));
//   }
class GradContext : public GraphBuilder {
 public:
  GradContext(Graph& graph, const OpDef& def, NodeId node, std::vector<ValueId> output_grads,
              std::vector<bool> needs_grad);

  using GraphBuilder::node;
  const Node& node() const { return graph().node(node_); }
  AttributeReader attrs() const { return AttributeReader(*def_, node()); }

  size_t num_inputs() const { return node().inputs.size(); }
  bool has_input(size_t index) const;
  ValueId input(size_t index) const;  // kNoValue when absent
  // The node's output; one that the forward pass did not want is added to the node on demand.
  ValueId output(size_t index);
  // Adds those of [begin, end) that are absent, all by one inference.
  void add_outputs(size_t begin, size_t end);
  size_t num_outputs() const { return node().outputs.size(); }

  // Gradients came in for this output. An operator with several outputs must handle absent ones.
  bool has_output_grad(size_t index) const;
  ValueId output_grad(size_t index) const;  // kNoValue when absent
  // Absent gradients as zeros of the output's shape.
  ValueId output_grad_or_zeros(size_t index);

  // Only these need to be built; setting others is an error.
  bool needs_grad(size_t index) const;
  // Must have the shape and dtype of the input. Not setting one that is needed means zero.
  void set_input_grad(size_t index, ValueId gradient);
  // The same for a rule that is not ours: throws DTypeError, ShapeError or InvalidModelError.
  void set_foreign_input_grad(size_t index, ValueId gradient);
  // reduce_to_shape_of for a rule that is not ours: throws ShapeError where `like` does not
  // broadcast to the shape of `a`.
  ValueId reduce_foreign_to_shape_of(ValueId a, ValueId like);
  const std::vector<ValueId>& input_grads() const { return input_grads_; }

  // Tells the forward node something that only the gradient knows.
  void set_forward_attribute(const std::string& name, Attribute value);

 private:
  const OpDef* def_;
  NodeId node_;
  std::vector<ValueId> output_grads_;
  std::vector<bool> needs_grad_;
  std::vector<ValueId> input_grads_;
};

}  // namespace ortrain
