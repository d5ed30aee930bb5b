// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/fuse_elementwise.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/ir/expr_builder.h"
#include "ortrain/ir/expr_interpreter.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"
#include "ortrain/passes/elementwise_group.h"
#include "ortrain/passes/fusion_groups.h"
#include "ortrain/passes/pass_notes.h"

namespace ortrain {
namespace {

class Fusion {
 public:
  explicit Fusion(Graph& graph) : graph_(graph), groups_(graph) {}

  bool run() {
    if (PassNotes* notes = PassNotes::current()) note_refusals(*notes);
    std::map<FusionGroups::ClusterId, std::vector<NodeId>> found;
    for (size_t at = 0; at < graph_.order().size(); ++at) {
      const NodeId id = graph_.order()[at];
      if (groups_.members(groups_.of(id)).size() > 1) found[groups_.of(id)].push_back(id);
    }
    if (found.empty()) return false;
    users_ = graph_.users();
    is_output_.assign(graph_.num_values(), false);
    for (const GraphOutput& output : graph_.outputs()) {
      is_output_[static_cast<size_t>(output.value)] = true;
    }
    bool changed = false;
    for (const auto& [cluster, members] : found) {
      if (rewrite(cluster, members)) {
        changed = true;
      } else if (PassNotes* notes = PassNotes::current()) {
        notes->refused(graph_, {members.front(), members.back()},
                       "what the group reads does not give its shape");
      }
    }
    return changed;
  }

 private:
  void note_refusals(PassNotes& notes) const;

  bool rewrite(FusionGroups::ClusterId cluster, const std::vector<NodeId>& members);
  bool build(const ElementwiseGroup& group, const std::vector<NodeId>& members,
             bool inline_constants);
  ExprReg operand(const ElementwiseGroup& group, ValueId id, bool inline_constants);
  ExprReg emit(const ElementwiseGroup& group, const Node& node, bool inline_constants);
  ExprReg rounded(ExprReg reg, ValueId id, FusionGroups::ClusterId cluster);
  bool leaves_group(ValueId id, FusionGroups::ClusterId cluster) const;

  Graph& graph_;
  FusionGroups groups_;
  std::vector<std::vector<NodeId>> users_;
  std::vector<bool> is_output_;
  // Of the program being built.
  ExprBuilder builder_;
  std::map<ValueId, ExprReg> registers_;
  std::vector<ValueId> inputs_;
};

// Every value that goes from one node to another, where one of them could be in a group: it was
// written to memory for the reason noted.
void Fusion::note_refusals(PassNotes& notes) const {
  for (NodeId id : graph_.order()) {
    const Node& node = graph_.node(id);
    if (groups_.is_constant(node)) continue;
    std::vector<NodeId> seen;
    for (ValueId input : node.inputs) {
      const NodeId maker = input == kNoValue ? kNoNode : graph_.value(input).producer;
      if (maker == kNoNode || groups_.of(maker) == groups_.of(id)) continue;
      if (std::ranges::find(seen, maker) != seen.end()) continue;
      seen.push_back(maker);
      const bool maker_fits = groups_.is_elementwise(maker);
      const bool reader_fits = groups_.is_elementwise(id);
      if (!maker_fits && !reader_fits) continue;
      if (maker_fits && reader_fits) {
        const auto found = groups_.refusals().find({maker, id});
        if (found != groups_.refusals().end()) notes.refused(graph_, {maker, id}, found->second);
        continue;
      }
      const Node& other = graph_.node(maker_fits ? id : maker);
      if (groups_.is_constant(other)) continue;
      std::string why;
      if (!group_of(graph_, other, &why)) notes.refused(graph_, {maker, id}, why);
    }
  }
}

bool Fusion::leaves_group(ValueId id, FusionGroups::ClusterId cluster) const {
  if (is_output_[static_cast<size_t>(id)]) return true;
  const std::vector<NodeId>& users = users_[static_cast<size_t>(id)];
  return std::any_of(users.begin(), users.end(),
                     [&](NodeId user) { return groups_.of(user) != cluster; });
}

ExprReg Fusion::operand(const ElementwiseGroup& group, ValueId id, bool inline_constants) {
  auto found = registers_.find(id);
  if (found != registers_.end()) return found->second;
  const Value& value = graph_.value(id);
  ExprReg reg = kNoExprReg;
  if (inline_constants && value.kind == ValueKind::constant && value.constant.numel() == 1) {
    reg = is_float(value.dtype) ? builder_.constant(value.dtype, value.constant.to_double())
                                : builder_.int_constant(value.dtype, value.constant.to_int64s()[0]);
  } else {
    const bool one_per_row = value.shape.empty() || value.shape.back().is(1);
    const bool rows_differ = !group.shape.empty() && !group.shape.back().is(1);
    reg = builder_.input(value.dtype, one_per_row && rows_differ);
    inputs_.push_back(id);
  }
  registers_[id] = reg;
  return reg;
}

// A program computes 16 bits in 32 and rounds what it stores. What overflows in float16 does so
// there too for those who ask, or go on in more bits; bfloat16 has the range of float32, and goes
// on unrounded.
ExprReg Fusion::rounded(ExprReg reg, ValueId id, FusionGroups::ClusterId cluster) {
  const Value& value = graph_.value(id);
  if (!is_float(value.dtype) || size_of(value.dtype) != 2 || value.producer == kNoNode) return reg;
  if (groups_.of(value.producer) != cluster) return reg;
  const Node& maker = graph_.node(value.producer);
  return maker.domain.empty() && maker.op == "Cast" ? reg : builder_.convert(reg, value.dtype);
}

ExprReg Fusion::emit(const ElementwiseGroup& group, const Node& node, bool inline_constants) {
  if (const std::optional<ExprOp> reduction = row_reduction_of(node)) {
    return builder_.emit(*reduction, {operand(group, node.inputs[0], inline_constants)});
  }
  const FusionGroups::ClusterId cluster = groups_.of(graph_.value(node.outputs[0]).producer);
  const DType type = graph_.value(node.outputs[0]).dtype;
  const bool widens = node.domain.empty() && node.op == "Cast" && size_of(type) > 2;
  std::vector<ExprEmitter::Operand> operands;
  for (ValueId id : node.inputs) {
    if (id == kNoValue) {
      operands.emplace_back();
      continue;
    }
    const Value& value = graph_.value(id);
    std::optional<double> known;
    if (value.kind == ValueKind::constant && value.constant.numel() == 1) {
      known = value.constant.to_double();
    }
    ExprReg reg = operand(group, id, inline_constants);
    if (!is_float(type) || (widens && value.dtype == DType::f16)) reg = rounded(reg, id, cluster);
    operands.push_back({reg, value.dtype, known});
  }
  const OpDef& def = op_registry().get(node.domain, node.op);
  ExprEmitter emitter(builder_, def, node, std::move(operands), type);
  return def.expression(emitter);
}

bool Fusion::rewrite(FusionGroups::ClusterId cluster, const std::vector<NodeId>& members) {
  const ElementwiseGroup& group = groups_.common(cluster);
  // A scalar constant of high rank can be what gives the group its rank.
  return build(group, members, true) || build(group, members, false);
}

bool Fusion::build(const ElementwiseGroup& group, const std::vector<NodeId>& members,
                   bool inline_constants) {
  builder_ = ExprBuilder();
  registers_.clear();
  inputs_.clear();
  const FusionGroups::ClusterId cluster = groups_.of(members[0]);
  std::vector<ValueId> outputs;
  for (NodeId id : members) {
    const ValueId result = graph_.node(id).outputs[0];
    registers_[result] = emit(group, graph_.node(id), inline_constants);
    if (!leaves_group(result, cluster)) continue;
    builder_.output(registers_[result], graph_.value(result).dtype);
    outputs.push_back(result);
  }
  if (outputs.empty()) return false;
  std::vector<Shape> shapes;
  for (ValueId id : inputs_) shapes.push_back(graph_.value(id).shape);
  Shape full;
  for (const Shape& shape : shapes) full = broadcast(full, shape);
  if (full != group.shape) return false;

  const ExprProgram program = builder_.finish();
  for (size_t k = 0; k < outputs.size(); ++k) {
    if (expr_output_shape(program, full, k) != graph_.value(outputs[k]).shape) return false;
  }
  // The last member becomes the node, so that its place in the order is kept.
  if (PassNotes* notes = PassNotes::current()) notes->taken(graph_, members.back(), members);
  for (NodeId id : members) graph_.node(id).outputs.assign(1, kNoValue);
  const NodeId last = members.back();
  Node& fused = graph_.node(last);
  fused.op = "Fused";
  fused.domain = kOrtrainDomain;
  fused.attributes = {{"program", program.text()}};
  fused.inputs = inputs_;
  fused.outputs = outputs;
  for (size_t k = 0; k < outputs.size(); ++k) {
    graph_.value(outputs[k]).producer = last;
    graph_.value(outputs[k]).output_index = static_cast<int>(k);
  }
  return true;
}

// Elementwise nodes read through an Expand where their own broadcasting gives the same shape.
bool absorb_expands(Graph& graph) {
  bool changed = false;
  for (NodeId id : graph.order()) {
    Node& node = graph.node(id);
    if (node.outputs.size() != 1 || node.outputs[0] == kNoValue) continue;
    if (!op_registry().get(node.domain, node.op).expression) continue;
    for (ValueId& input : node.inputs) {
      const NodeId producer = input == kNoValue ? kNoNode : graph.value(input).producer;
      if (producer == kNoNode) continue;
      const Node& expand = graph.node(producer);
      if (!expand.domain.empty() || expand.op != "Expand") continue;
      Shape shape;
      for (ValueId other : node.inputs) {
        if (other == kNoValue) continue;
        const ValueId source = other == input ? expand.inputs[0] : other;
        shape = broadcast(shape, graph.value(source).shape);
      }
      if (shape != graph.value(node.outputs[0]).shape) continue;
      input = expand.inputs[0];
      changed = true;
    }
  }
  return changed;
}

bool run(Graph& graph) {
  const bool absorbed = absorb_expands(graph);
  return Fusion(graph).run() || absorbed;
}

}  // namespace

Pass fuse_elementwise() {
  return {.name = "fuse_elementwise",
          .summary = "Elementwise nodes and reductions of rows that hang together become one node.",
          .run = run};
}

}  // namespace ortrain
