// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "ortrain/ir/graph.h"

namespace ortrain {

// Appends nodes to a graph with their types and shapes inferred at once. Used by the importer, the
// capture, gradient rules and passes alike.
class GraphBuilder {
 public:
  explicit GraphBuilder(Graph& graph) : graph_(&graph) {}

  Graph& graph() const { return *graph_; }
  // Nodes added from now on get this phase / this layer path / this checkpoint.
  void set_phase(Phase phase) { phase_ = phase; }
  void set_layer(std::string layer) { layer_ = std::move(layer); }
  const std::string& layer() const { return layer_; }
  void set_checkpoint(int checkpoint) { checkpoint_ = checkpoint; }
  // Composites with inference of their own become nodes, which no kernel runs, instead of what
  // they stand for: for files.
  void set_keeps_composites(bool keeps) { keeps_composites_ = keeps; }

  const Value& value(ValueId id) const { return graph_->value(id); }
  const Shape& shape(ValueId id) const { return graph_->value(id).shape; }
  int64_t rank(ValueId id) const { return static_cast<int64_t>(shape(id).size()); }
  DType dtype(ValueId id) const { return graph_->value(id).dtype; }

  // Adds a node; kNoValue among `inputs` is an absent optional input. `wanted` marks which outputs
  // are made (kNoValue in the result otherwise). Throws what inference throws.
  std::vector<ValueId> node(std::string_view domain, std::string_view op,
                            std::vector<ValueId> inputs, Attributes attributes,
                            std::vector<bool> wanted);
  // One output, standard domain.
  ValueId op(std::string_view op, std::vector<ValueId> inputs, Attributes attributes = {});
  // One output, domain "ortrain".
  ValueId own(std::string_view op, std::vector<ValueId> inputs, Attributes attributes = {});

  ValueId constant(TensorData data) { return graph_->add_constant(std::move(data)); }
  ValueId int64s(const std::vector<int64_t>& values);
  // A rank-0 constant of `dtype`.
  ValueId scalar(DType dtype, double value);

  // --- arithmetic, with NumPy broadcasting
  ValueId add(ValueId a, ValueId b) { return op("Add", {a, b}); }
  ValueId sub(ValueId a, ValueId b) { return op("Sub", {a, b}); }
  ValueId mul(ValueId a, ValueId b) { return op("Mul", {a, b}); }
  ValueId div(ValueId a, ValueId b) { return op("Div", {a, b}); }
  ValueId neg(ValueId a) { return op("Neg", {a}); }
  // a (op) a constant of a's type
  ValueId add(ValueId a, double b) { return add(a, scalar(dtype(a), b)); }
  ValueId sub(ValueId a, double b) { return sub(a, scalar(dtype(a), b)); }
  ValueId mul(ValueId a, double b) { return mul(a, scalar(dtype(a), b)); }
  ValueId div(ValueId a, double b) { return div(a, scalar(dtype(a), b)); }
  ValueId unary(std::string_view name, ValueId a) { return op(name, {a}); }
  ValueId where(ValueId condition, ValueId a, ValueId b) { return op("Where", {condition, a, b}); }
  ValueId cast(ValueId a, DType to);  // `a` itself if it has the type
  // -1, 0 or 1; 0 for NaN and for -0.0, of which Sign gives back both.
  ValueId sign_or_zero(ValueId a);

  // --- shapes
  ValueId shape_of(ValueId a);  // int64 [rank]; a constant when the shape is constant
  ValueId reshape(ValueId a, ValueId shape) {
    return op("Reshape", {a, shape}, {{"allowzero", int64_t{1}}});
  }
  // To concrete extents; -1 and 0 as in ONNX Reshape (allowzero = 0).
  ValueId reshape(ValueId a, const std::vector<int64_t>& extents);
  // `a` itself if its shape is equal to that of `like` already.
  ValueId reshape_like(ValueId a, ValueId like);
  ValueId expand_like(ValueId a, ValueId like);
  ValueId unsqueeze(ValueId a, const std::vector<int64_t>& axes);
  ValueId squeeze(ValueId a, const std::vector<int64_t>& axes);
  ValueId transpose(ValueId a, const std::vector<int64_t>& perm);
  ValueId transpose_last_two(ValueId a);
  ValueId reduce_sum(ValueId a, const std::vector<int64_t>& axes, bool keepdims);  // no axes: all
  ValueId zeros_like(ValueId a);
  ValueId ones_like(ValueId a);
  // Sums `a` over the axes that broadcasting `like` to a's shape has repeated, so that the result
  // has the shape of `like`. Where symbols leave it open, ortrain::SumToShape decides when it runs.
  ValueId reduce_to_shape_of(ValueId a, ValueId like);

 private:
  Graph* graph_;
  Phase phase_ = Phase::forward;
  std::string layer_;
  int checkpoint_ = 0;
  bool keeps_composites_ = false;
};

}  // namespace ortrain
