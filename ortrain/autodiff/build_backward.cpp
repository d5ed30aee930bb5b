// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/autodiff/build_backward.h"

#include <algorithm>

#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain {
namespace {

size_t index_of(ValueId id) { return static_cast<size_t>(id); }

// Values that depend on an input with requires_grad through operators that pass gradients on.
std::vector<bool> values_that_need_grad(const Graph& graph) {
  std::vector<bool> needs(graph.num_values(), false);
  for (const GraphInput& input : graph.inputs()) {
    if (input.requires_grad && is_float(graph.value(input.value).dtype)) {
      needs[index_of(input.value)] = true;
    }
  }
  for (NodeId id : graph.order()) {
    const Node& node = graph.node(id);
    if (!op_registry().get(node.domain, node.op).differentiable) continue;
    const bool any = std::any_of(node.inputs.begin(), node.inputs.end(), [&](ValueId input) {
      return input != kNoValue && needs[index_of(input)];
    });
    if (!any) continue;
    for (ValueId output : node.outputs) {
      if (output != kNoValue && is_float(graph.value(output).dtype)) needs[index_of(output)] = true;
    }
  }
  return needs;
}

// Values from which one of `roots` can be reached (the part worth walking backwards).
std::vector<bool> values_that_reach(const Graph& graph, const std::vector<ValueId>& roots) {
  std::vector<bool> reaches(graph.num_values(), false);
  for (ValueId root : roots) reaches[index_of(root)] = true;
  for (auto it = graph.order().rbegin(); it != graph.order().rend(); ++it) {
    const Node& node = graph.node(*it);
    const bool any = std::any_of(node.outputs.begin(), node.outputs.end(), [&](ValueId output) {
      return output != kNoValue && reaches[index_of(output)];
    });
    if (!any) continue;
    for (ValueId input : node.inputs) {
      if (input != kNoValue) reaches[index_of(input)] = true;
    }
  }
  return reaches;
}

std::vector<ValueId> root_values(const Graph& graph, const BackwardOptions& options) {
  std::vector<ValueId> roots;
  for (size_t index : options.output_indices) {
    if (index >= graph.outputs().size()) {
      throw InvalidModelError(str("there is no output ", index, " to differentiate"));
    }
    const GraphOutput& output = graph.outputs()[index];
    if (!is_float(graph.value(output.value).dtype)) {
      throw DTypeError(str("output '", output.name, "' is ",
                           name_of(graph.value(output.value).dtype),
                           ": only floating point outputs have gradients"));
    }
    roots.push_back(output.value);
  }
  return roots;
}

// The gradients that came in for each value so far.
class Accumulator {
 public:
  explicit Accumulator(Graph& graph) : graph_(&graph), parts_(graph.num_values()) {}

  void add(ValueId value, ValueId gradient) {
    if (index_of(value) >= parts_.size()) parts_.resize(graph_->num_values());
    parts_[index_of(value)].push_back(gradient);
  }

  // The sum; kNoValue when nothing came in. Later contributions must not follow.
  ValueId take(ValueId value, const std::string& layer) {
    if (index_of(value) >= parts_.size()) return kNoValue;
    std::vector<ValueId>& parts = parts_[index_of(value)];
    if (parts.empty()) return kNoValue;
    GraphBuilder builder(*graph_);
    builder.set_phase(Phase::backward);
    builder.set_layer(layer);
    ValueId sum = parts[0];
    for (size_t i = 1; i < parts.size(); ++i) sum = builder.add(sum, parts[i]);
    parts = {sum};
    return sum;
  }

 private:
  Graph* graph_;
  std::vector<std::vector<ValueId>> parts_;
};

// For each user output, in order, the names of the inputs with `requires_grad` from which a path
// leads to it: through nodes that pass, over values that carry.
template <typename Passes, typename Carries>
std::vector<std::vector<std::string>> paths(const Graph& graph, const Passes& passes,
                                            const Carries& carries) {
  std::vector<ValueId> roots;
  for (const GraphInput& input : graph.inputs()) {
    if (input.requires_grad && is_float(graph.value(input.value).dtype)) {
      roots.push_back(input.value);
    }
  }
  std::vector<std::vector<bool>> reached(graph.num_values());  // a bit per root; empty: none
  for (size_t i = 0; i < roots.size(); ++i) {
    std::vector<bool>& bits = reached[index_of(roots[i])];
    bits.resize(roots.size());
    bits[i] = true;
  }
  for (NodeId id : graph.order()) {
    const Node& node = graph.node(id);
    if (!passes(node)) continue;
    std::vector<bool> bits;
    for (ValueId input : node.inputs) {
      if (input == kNoValue) continue;
      const std::vector<bool>& more = reached[index_of(input)];
      bits.resize(std::max(bits.size(), more.size()));
      for (size_t i = 0; i < more.size(); ++i) bits[i] = bits[i] || more[i];
    }
    for (ValueId output : node.outputs) {
      if (output != kNoValue && carries(output)) reached[index_of(output)] = bits;
    }
  }
  std::vector<std::vector<std::string>> result;
  for (const GraphOutput& output : graph.outputs()) {
    if (output.role != OutputRole::user) continue;
    const std::vector<bool>& bits = reached[index_of(output.value)];
    std::vector<std::string>& names = result.emplace_back();
    for (size_t i = 0; i < bits.size(); ++i) {
      if (bits[i]) names.push_back(graph.value(roots[i]).name);
    }
  }
  return result;
}

}  // namespace

void build_backward(Graph& graph, const BackwardOptions& options) {
  const std::vector<ValueId> roots = root_values(graph, options);
  check(options.gradients.empty() || options.gradients.size() == roots.size(),
        "one gradient per output is needed");
  const std::vector<bool> needs = values_that_need_grad(graph);
  Accumulator gradients(graph);

  for (size_t i = 0; i < roots.size(); ++i) {
    if (!needs[index_of(roots[i])]) continue;
    const GraphOutput output = graph.outputs()[options.output_indices[i]];
    const Value root = graph.value(roots[i]);
    if (!options.gradients.empty()) {
      gradients.add(roots[i], options.gradients[i]);
      continue;
    }
    const ValueId gradient = graph.add_input({.role = InputRole::gradient, .target = output.name},
                                             "grad." + output.name, root.dtype, root.shape);
    gradients.add(roots[i], gradient);
  }

  const std::vector<NodeId> forward = graph.order();
  for (auto it = forward.rbegin(); it != forward.rend(); ++it) {
    const Node node = graph.node(*it);  // a copy: summing gradients adds nodes
    std::vector<bool> needs_grad;
    bool any_needed = false;
    for (ValueId input : node.inputs) {
      needs_grad.push_back(input != kNoValue && needs[index_of(input)]);
      any_needed = any_needed || needs_grad.back();
    }
    if (!any_needed) continue;
    const OpDef& def = op_registry().get(node.domain, node.op);
    if (!def.differentiable) continue;
    std::vector<ValueId> output_grads;
    bool any_grad = false;
    for (ValueId output : node.outputs) {
      const ValueId gradient = output == kNoValue ? kNoValue : gradients.take(output, node.name);
      output_grads.push_back(gradient);
      any_grad = any_grad || gradient != kNoValue;
    }
    if (!any_grad) continue;
    if (!def.gradient) {
      throw UnsupportedError(str(Graph::context(node), "this operator has no gradient rule"));
    }
    const std::vector<ValueId> inputs = node.inputs;
    GradContext grad(graph, def, *it, std::move(output_grads), needs_grad);
    with_context(Graph::context(node) + "gradient: ", [&] { def.gradient(grad); });
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (grad.input_grads()[i] != kNoValue) gradients.add(inputs[i], grad.input_grads()[i]);
    }
  }

  const std::vector<GraphInput> inputs = graph.inputs();
  for (const GraphInput& input : inputs) {
    if (!input.requires_grad) continue;
    const ValueId gradient = gradients.take(input.value, "");
    if (gradient == kNoValue) continue;
    const std::string& input_name = graph.value(input.value).name;
    graph.add_output({.value = gradient,
                      .name = "grad." + input_name,
                      .role = OutputRole::gradient,
                      .target = input_name});
  }
}

std::vector<std::string> missing_gradients(const Graph& graph, const BackwardOptions& options) {
  const std::vector<bool> needs = values_that_need_grad(graph);
  const std::vector<bool> reaches = values_that_reach(graph, root_values(graph, options));
  std::vector<std::string> missing;
  for (NodeId id : graph.order()) {
    const Node& node = graph.node(id);
    const OpDef& def = op_registry().get(node.domain, node.op);
    if (def.differentiability() != Differentiability::missing) continue;
    const auto marked = [](const std::vector<ValueId>& values, const std::vector<bool>& marks) {
      return std::any_of(values.begin(), values.end(),
                         [&](ValueId v) { return v != kNoValue && marks[index_of(v)]; });
    };
    if (marked(node.inputs, needs) && marked(node.outputs, reaches)) {
      missing.push_back(str(node.op, " '", node.name, "'"));
    }
  }
  return missing;
}

std::vector<bool> differentiable_outputs(const Graph& graph) {
  const std::vector<bool> needs = values_that_need_grad(graph);
  std::vector<bool> result;
  for (const GraphOutput& output : graph.outputs()) {
    if (output.role == OutputRole::user) result.push_back(needs[index_of(output.value)]);
  }
  return result;
}

std::vector<std::vector<std::string>> gradient_paths(const Graph& graph) {
  return paths(
      graph,
      [](const Node& node) { return op_registry().get(node.domain, node.op).differentiable; },
      [&](ValueId value) { return is_float(graph.value(value).dtype); });
}

std::vector<std::vector<std::string>> value_paths(const Graph& graph) {
  return paths(
      graph, [](const Node& node) { return node.op != "Shape" || !node.domain.empty(); },
      [](ValueId) { return true; });
}

std::vector<std::string> differentiable_input_updates(const Graph& graph) {
  const std::vector<bool> needs = values_that_need_grad(graph);
  std::vector<std::string> result;
  for (const GraphOutput& output : graph.outputs()) {
    if (output.role == OutputRole::input_update && needs[index_of(output.value)]) {
      result.push_back(output.target);
    }
  }
  return result;
}

}  // namespace ortrain
