// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/verifier.h"

#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/ir/graph_assembler.h"
#include "ortrain/ir/graph_compare.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/roles.h"

namespace ortrain {
namespace {

class Verifier {
 public:
  Verifier(const Graph& graph, const OpRegistry& registry)
      : graph_(graph),
        registry_(registry),
        defined_(graph.num_values(), false),
        gradients_(graph.num_values(), false) {}

  void run() {
    verify_names();
    verify_targets();
    define_sources();
    verify_order();
    symbols_ = input_symbols(graph_);
    for (NodeId id : graph_.order()) {
      verify_reads(graph_.node(id));
      define_outputs(id);
      verify_inference(graph_.node(id));
    }
    verify_outputs();
  }

 private:
  [[noreturn]] static void fail(const std::string& frame, std::string_view rule,
                                const std::string& what) {
    throw InvalidModelError(str(frame, "breaks the rule '", rule, "': ", what));
  }

  bool exists(ValueId id) const { return id >= 0 && static_cast<size_t>(id) < graph_.num_values(); }
  bool is_node(NodeId id) const {
    return id >= 0 && static_cast<size_t>(id) < graph_.num_node_slots();
  }

  void verify_names() {
    std::unordered_set<std::string_view> names;
    for (size_t i = 0; i < graph_.num_values(); ++i) {
      const auto id = static_cast<ValueId>(i);
      const std::string& name = graph_.value(id).name;
      if (name.empty()) fail("", "names", str("value ", i, " has no name"));
      if (!names.insert(name).second || graph_.find_value(name) != id) {
        fail("", "names", str("two values have the name '", name, "'"));
      }
    }
  }

  // Inputs of one target are one piece of memory, which a plan would not know; nor which of two
  // updates comes last.
  void verify_targets() {
    std::set<std::pair<bool, std::string_view>> kept, updated;
    for (const GraphInput& input : graph_.inputs()) {
      if (!is_kept(input.role)) continue;
      if (!kept.emplace(input.role == InputRole::state, input.target).second) {
        fail("", "targets", str("two inputs are '", input.target, "'"));
      }
    }
    for (const GraphOutput& output : graph_.outputs()) {
      const bool is_state = output.role == OutputRole::state_update;
      if (!is_state && output.role != OutputRole::buffer_update) continue;
      if (!updated.emplace(is_state, output.target).second) {
        fail("", "targets", str("two outputs update '", output.target, "'"));
      }
    }
  }

  void define_sources() {
    for (const GraphInput& input : graph_.inputs()) {
      if (!exists(input.value)) fail("", "ids", str("an input has the id ", input.value));
      const Value& value = graph_.value(input.value);
      if (value.kind != ValueKind::input || defined_[static_cast<size_t>(input.value)]) {
        fail("", "single assignment",
             str("input '", value.name, "' stands twice or is something else, too"));
      }
      defined_[static_cast<size_t>(input.value)] = true;
      gradients_[static_cast<size_t>(input.value)] = input.role == InputRole::gradient;
      if (value.dtype == DType::undefined) {
        fail("", "inference", str("input '", value.name, "' has no type"));
      }
    }
    for (size_t i = 0; i < graph_.num_values(); ++i) {
      const Value& value = graph_.value(static_cast<ValueId>(i));
      if (value.kind != ValueKind::constant) continue;
      defined_[i] = true;
      if (value.dtype != value.constant.dtype() || value.dtype == DType::undefined ||
          value.shape != to_shape(value.constant.dims())) {
        fail("", "inference",
             str("constant '", value.name, "' has the contents of another type or shape"));
      }
    }
  }

  // Ids alone; whether each node stands after what it reads shows when they are walked.
  void verify_order() {
    std::vector<bool> seen(graph_.num_node_slots(), false);
    for (NodeId id : graph_.order()) {
      if (!is_node(id) || !graph_.alive(id)) {
        fail("", "order", str("node ", id, " is listed and does not live"));
      }
      const std::string frame = Graph::context(graph_.node(id));
      if (seen[static_cast<size_t>(id)]) fail(frame, "order", "it is listed twice");
      seen[static_cast<size_t>(id)] = true;
      for (ValueId value : graph_.node(id).inputs) verify_id(frame, value);
      for (ValueId value : graph_.node(id).outputs) verify_id(frame, value);
    }
    for (size_t i = 0; i < seen.size(); ++i) {
      const auto id = static_cast<NodeId>(i);
      if (graph_.alive(id) && !seen[i]) {
        fail(Graph::context(graph_.node(id)), "order", "it lives and is not listed");
      }
    }
  }

  void verify_id(const std::string& frame, ValueId value) const {
    if (value != kNoValue && !exists(value)) fail(frame, "ids", str("value ", value));
  }

  // Why nothing defines this value; both a read and an output may find out.
  [[noreturn]] void fail_undefined(const std::string& frame, ValueId id) const {
    const Value& value = graph_.value(id);
    if (value.kind == ValueKind::input) {
      fail(frame, "ids", str("'", value.name, "' is no input of the graph"));
    }
    if (!is_node(value.producer) || !graph_.alive(value.producer)) {
      fail(frame, "dead reference", str("nothing makes '", value.name, "' any more"));
    }
    fail(frame, "order", str("'", value.name, "' is made later"));
  }

  void verify_reads(const Node& node) {
    for (ValueId input : node.inputs) {
      if (input == kNoValue) continue;
      const std::string frame = Graph::context(node);
      if (!defined_[static_cast<size_t>(input)]) fail_undefined(frame, input);
      if (node.phase == Phase::forward && is_backward(input)) {
        fail(frame, "phase",
             str("a forward node reads '", graph_.value(input).name,
                 "', known only in the backward phase"));
      }
    }
  }

  bool is_backward(ValueId id) const {
    const Value& value = graph_.value(id);
    if (value.kind == ValueKind::constant) return false;
    if (value.kind == ValueKind::computed) {
      return graph_.node(value.producer).phase == Phase::backward;
    }
    return gradients_[static_cast<size_t>(id)];
  }

  void define_outputs(NodeId id) {
    const Node& node = graph_.node(id);
    const std::string frame = Graph::context(node);
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (node.outputs[i] == kNoValue) continue;
      const auto output = static_cast<size_t>(node.outputs[i]);
      const Value& value = graph_.value(node.outputs[i]);
      if (defined_[output] || value.kind != ValueKind::computed || value.producer != id ||
          value.output_index != static_cast<int>(i)) {
        fail(frame, "single assignment",
             str("output '", value.name, "' is not this node's output ", i, " alone"));
      }
      defined_[output] = true;
    }
  }

  void verify_inference(const Node& node) const {
    const std::string frame = Graph::context(node);
    std::vector<InferredValue> outputs;
    try {
      const OpDef& def = registry_.get(node.domain, node.op);
      outputs = infer_node(def, node, inferred_inputs(graph_, node));
    } catch (const InternalError&) {
      throw;
    } catch (const Error& error) {
      fail(frame, "inference", error.what());
    }
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (node.outputs[i] == kNoValue) continue;
      const Value& value = graph_.value(node.outputs[i]);
      const InferredValue& inferred = outputs[i];
      if (value.dtype != inferred.dtype || !shapes_agree(value.shape, inferred.shape, symbols_)) {
        fail(frame, "inference",
             str("output '", value.name, "' is ", name_of(value.dtype), shape_str(value.shape),
                 ", inferred is ", name_of(inferred.dtype), shape_str(inferred.shape)));
      }
      if (value.known && inferred.known && !shapes_agree(*value.known, *inferred.known, symbols_)) {
        fail(frame, "inference",
             str("output '", value.name, "' holds ", shape_str(*value.known), ", inferred is ",
                 shape_str(*inferred.known)));
      }
    }
  }

  void verify_outputs() const {
    for (const GraphOutput& output : graph_.outputs()) {
      const std::string frame = str("output '", output.name, "' ");
      if (!exists(output.value)) fail(frame, "ids", str("value ", output.value));
      if (!defined_[static_cast<size_t>(output.value)]) fail_undefined(frame, output.value);
      if (output.role == OutputRole::user && is_backward(output.value)) {
        fail(frame, "phase", "the user gets it before the backward phase");
      }
    }
  }

  const Graph& graph_;
  const OpRegistry& registry_;
  std::vector<bool> defined_;    // by value: it stands before the place that run() has reached
  std::vector<bool> gradients_;  // by value: an incoming gradient
  std::set<std::string> symbols_;
};

}  // namespace

void verify(const Graph& graph) { verify(graph, op_registry()); }

void verify(const Graph& graph, const OpRegistry& registry) { Verifier(graph, registry).run(); }

}  // namespace ortrain
