// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/mixed_precision.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/base/log.h"
#include "ortrain/ir/graph_assembler.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain {
namespace {

size_t index_of(ValueId id) { return static_cast<size_t>(id); }

std::string full_name(const OpDef& def) {
  return def.domain.empty() ? def.name : def.domain + "::" + def.name;
}

// The lists that operators stand in, by full name where it differs from their definition's.
std::map<std::string, Precision> overrides(const MixedPrecision& options) {
  const std::pair<const char*, Precision> lists[] = {
      {"allow", Precision::allow}, {"deny", Precision::deny}, {"promote", Precision::promote}};
  std::map<std::string, Precision> result;
  for (const auto& [list, precision] : lists) {
    const auto& names = precision == Precision::allow  ? options.allow
                        : precision == Precision::deny ? options.deny
                                                       : options.promote;
    for (const std::string& name : names) {
      bool found = false;
      for (const OpDef* def : op_registry().all()) {
        if (def->name != name && full_name(*def) != name) continue;
        found = true;
        const bool has_half = std::ranges::any_of(def->types, [&](const auto& type) {
          return type.second.contains(options.dtype) && type.second.contains(DType::f32);
        });
        if (precision == Precision::allow && !has_half) {
          throw InvalidModelError(str("'", name, "' in the list '", list, "' is not computed in ",
                                      name_of(options.dtype)));
        }
        if (!result.emplace(full_name(*def), precision).second) {
          throw InvalidModelError(
              str("'", name, "' stands in the lists twice, last in '", list, "'"));
        }
      }
      if (!found)
        throw InvalidModelError(str("'", name, "' in the list '", list, "' is no operator"));
    }
  }
  return result;
}

class PrecisionMixer {
 public:
  PrecisionMixer(Graph& graph, const MixedPrecision& options)
      : graph_(graph), builder_(graph), half_(options.dtype), overrides_(overrides(options)) {
    for (size_t id = 0; id < graph.num_values(); ++id) {
      original_.push_back(graph.value(static_cast<ValueId>(id)).dtype);
    }
  }

  bool run() {
    const std::vector<NodeId> order = graph_.order();
    for (NodeId id : order) visit(graph_.node(id));
    for (GraphOutput& output : graph_.outputs()) {
      const DType wanted = original_[index_of(output.value)];
      builder_.set_layer("");
      output.value = as(output.value, wanted);
    }
    return changed_;
  }

 private:
  // Inputs of a node that have one type.
  struct Group {
    DTypeSet types;
    std::vector<size_t> inputs;
  };

  void visit(Node& node) {
    const OpDef& def = op_registry().get(node.domain, node.op);
    builder_.set_layer(node.name);
    const auto listed = overrides_.find(full_name(def));
    const Precision precision = !def.value_names.empty()     ? Precision::keep
                                : listed != overrides_.end() ? listed->second
                                                             : def.precision;
    std::map<std::string, Group> groups;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      const ValueId id = node.inputs[i];
      if (id == kNoValue || !is_mixed(graph_.value(id).dtype)) continue;
      const FormalValue* formal = def.formal_input(i);
      const auto types = formal != nullptr ? def.types.find(formal->type) : def.types.end();
      if (precision == Precision::keep || types == def.types.end()) {
        node.inputs[i] = as(id, original_[index_of(id)]);
        continue;
      }
      // "T*": each input has a type of its own.
      const bool each = formal->type.ends_with('*');
      Group& group = groups[each ? str(formal->type, i) : formal->type];
      group.types = types->second;
      group.inputs.push_back(i);
    }
    for (const auto& [name, group] : groups) {
      const DType target = type_of(precision, node, group);
      for (size_t i : group.inputs) node.inputs[i] = as(node.inputs[i], target);
    }
    if (!groups.empty()) infer_again(def, node);
  }

  bool is_mixed(DType dtype) const { return dtype == DType::f32 || dtype == half_; }

  DType type_of(Precision precision, const Node& node, const Group& group) const {
    if (!group.types.contains(half_)) return DType::f32;
    if (!group.types.contains(DType::f32)) return half_;
    if (precision == Precision::allow) return half_;
    if (precision == Precision::deny) return DType::f32;
    bool lowered = false;
    for (size_t i : group.inputs) {
      if (adapts(node.inputs[i])) continue;
      if (graph_.value(node.inputs[i]).dtype == DType::f32) return DType::f32;
      lowered = true;
    }
    return lowered ? half_ : DType::f32;
  }

  // A constant of one element that 16 bits can hold is no reason to compute in float32. One that
  // they cannot, as the lowest float in a mask, is.
  bool adapts(ValueId id) const {
    const Value& value = graph_.value(id);
    if (value.kind != ValueKind::constant || value.constant.numel() != 1) return false;
    const double number = value.constant.to_double();
    const double rounded = TensorData::scalar(half_, number).to_double();
    return std::isfinite(rounded) || !std::isfinite(number);
  }

  // The value in a type; made once.
  ValueId as(ValueId id, DType dtype) {
    const Value& value = graph_.value(id);
    if (value.dtype == dtype) return id;
    const auto [made, is_new] = casts_.try_emplace({id, dtype}, kNoValue);
    if (!is_new) return made->second;
    changed_ = true;
    if (value.kind == ValueKind::constant && value.constant.numel() == 1) {
      const auto scalar =
          std::make_shared<TensorData>(TensorData::scalar(dtype, value.constant.to_double()));
      made->second =
          builder_.constant(TensorData(dtype, value.constant.dims(), scalar->data(), scalar));
    } else {
      // Computed again where the value is; casts of inputs live with them.
      const NodeId producer = value.producer;
      builder_.set_checkpoint(producer == kNoNode ? 0 : graph_.node(producer).checkpoint);
      made->second = builder_.cast(id, dtype);
    }
    original_.resize(graph_.num_values(), dtype);
    return made->second;
  }

  void infer_again(const OpDef& def, Node& node) {
    const std::vector<InferredValue> outputs = infer_node(def, node, inferred_inputs(graph_, node));
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (node.outputs[i] != kNoValue) graph_.value(node.outputs[i]).dtype = outputs[i].dtype;
    }
  }

  Graph& graph_;
  GraphBuilder builder_;
  const DType half_;
  const std::map<std::string, Precision> overrides_;
  std::vector<DType> original_;  // by value
  std::map<std::pair<ValueId, DType>, ValueId> casts_;
  bool changed_ = false;
};

}  // namespace

bool mixed_precision(Graph& graph, const MixedPrecision& options) {
  if (options.dtype != DType::bf16 && options.dtype != DType::f16) {
    throw InvalidModelError(
        str("mixed precision in ", name_of(options.dtype), ", expected bfloat16 or float16"));
  }
  const size_t before = graph.order().size();
  const bool changed = PrecisionMixer(graph, options).run();
  if (changed) {
    graph.sort();
    graph.remove_dead_nodes();
  }
  log_line("passes",
           str("precision/mixed_precision: ", before, " -> ", graph.order().size(), " nodes"));
  return changed;
}

}  // namespace ortrain
