// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <sstream>

#include "ortrain/ir/roles.h"
#include "ortrain/ir/text.h"
#include "ortrain/ir/text_scanner.h"
#include "ortrain/ir/text_values.h"

namespace ortrain {
namespace {

class Printer {
 public:
  Printer(const Graph& graph, const TextOptions& options) : graph_(graph), options_(options) {}

  std::string print() {
    out_ << "graph";
    if (!graph_.name.empty()) out_ << ' ' << name_text(graph_.name);
    out_ << " (";
    for (const GraphInput& input : graph_.inputs()) {
      out_ << (&input == &graph_.inputs().front() ? "" : ",\n       ");
      print_input(input);
    }
    out_ << ")\n    => (";
    for (const GraphOutput& output : graph_.outputs()) {
      out_ << (&output == &graph_.outputs().front() ? "" : ", ");
      print_output(output);
    }
    out_ << ") {\n";
    print_constants();
    Phase phase = Phase::forward;
    for (NodeId id : graph_.order()) {
      const Node& node = graph_.node(id);
      if (node.phase != phase) {
        phase = node.phase;
        out_ << (phase == Phase::forward ? "forward:\n" : "backward:\n");
      }
      print_node(node);
    }
    out_ << "}\n";
    return std::move(out_).str();
  }

 private:
  std::string value_name(ValueId id) const {
    return id == kNoValue ? "_" : name_text(graph_.value(id).name);
  }

  std::string type_of(ValueId id) const {
    const Value& value = graph_.value(id);
    return std::string(name_of(value.dtype)) + shape_text(value.shape);
  }

  void print_input(const GraphInput& input) {
    out_ << type_of(input.value) << ' ' << value_name(input.value);
    const bool plain_user = input.role == InputRole::user && input.target.empty();
    if (plain_user && !input.requires_grad) return;
    // A parameter without a target would get its own name when it is read back.
    const bool needs_target = is_kept(input.role);
    out_ << " [" << name_of(input.role);
    if (needs_target || !input.target.empty()) out_ << ' ' << name_text(input.target);
    out_ << (input.requires_grad ? " grad]" : "]");
  }

  void print_output(const GraphOutput& output) {
    out_ << value_name(output.value);
    if (output.name != graph_.value(output.value).name) out_ << " as " << name_text(output.name);
    if (output.role == OutputRole::user && output.target.empty()) return;
    out_ << " [" << name_of(output.role);
    if (!output.target.empty()) out_ << ' ' << name_text(output.target);
    out_ << "]";
  }

  void print_constants() {
    std::vector<bool> used(graph_.num_values(), false);
    for (NodeId id : graph_.order()) {
      for (ValueId input : graph_.node(id).inputs) {
        if (input != kNoValue) used[static_cast<size_t>(input)] = true;
      }
    }
    for (const GraphOutput& output : graph_.outputs()) {
      used[static_cast<size_t>(output.value)] = true;
    }
    for (size_t i = 0; i < used.size(); ++i) {
      const auto id = static_cast<ValueId>(i);
      const Value& value = graph_.value(id);
      if (!used[i] || value.kind != ValueKind::constant) continue;
      out_ << "  const " << value_name(id) << " = " << tensor_text(value.constant, options_)
           << '\n';
    }
  }

  void print_node(const Node& node) {
    out_ << "  ";
    if (node.outputs.empty()) out_ << "()";
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      out_ << (i ? ", " : "") << value_name(node.outputs[i]);
    }
    out_ << " = ";
    if (!node.domain.empty()) out_ << name_text(node.domain) << "::";
    out_ << name_text(node.op) << attributes_text(node.attributes, options_) << " (";
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      out_ << (i ? ", " : "") << value_name(node.inputs[i]);
    }
    out_ << ")";
    if (!node.name.empty()) out_ << " @" << name_text(node.name);
    if (node.checkpoint != 0) out_ << " ~" << node.checkpoint;
    if (options_.types) print_types(node);
    out_ << '\n';
  }

  void print_types(const Node& node) {
    const char* separator = "  # ";
    for (ValueId output : node.outputs) {
      if (output == kNoValue) continue;
      out_ << separator << type_of(output);
      separator = ", ";
    }
  }

  const Graph& graph_;
  const TextOptions& options_;
  std::ostringstream out_;
};

}  // namespace

std::string print_graph(const Graph& graph, const TextOptions& options) {
  return Printer(graph, options).print();
}

}  // namespace ortrain
