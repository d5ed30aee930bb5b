// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/graph.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/base/error.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/roles.h"
#include "ortrain/ir/standard_form.h"
#include "ortrain/ir/text.h"
#include "ortrain/ir/verifier.h"
#include "ortrain/passes/checkpoint_layers.h"
#include "ortrain/passes/mixed_precision.h"
#include "ortrain/passes/pass_notes.h"
#include "ortrain/passes/pipeline.h"
#include "python/src/attribute_conversion.h"
#include "python/src/init.h"
#include "python/src/tensor_exchange.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

// A value of the graph under construction.
struct ValueHandle {
  std::shared_ptr<Graph> graph;
  ValueId id = kNoValue;
};

Shape parse_shape(nb::handle extents) {
  Shape shape;
  for (nb::handle extent : extents) {
    if (nb::isinstance<nb::str>(extent)) {
      shape.push_back(Dim::parse(nb::cast<std::string>(extent)));
    } else {
      shape.push_back(Dim(nb::cast<int64_t>(extent)));
    }
  }
  return shape;
}

InputRole input_role(const std::string& name) {
  if (const auto role = role_in(kInputRoles, name)) return *role;
  throw InvalidModelError(str("'", name, "' is no role of an input"));
}

OutputRole output_role(const std::string& name) {
  if (const auto role = role_in(kOutputRoles, name)) return *role;
  throw InvalidModelError(str("'", name, "' is no role of an output"));
}

// No operator has more; see Split.
constexpr int kMostOutputs = 65536;

// Builds a graph node by node; see capture/builder.py for the contract.
class PythonGraphBuilder {
 public:
  explicit PythonGraphBuilder(std::string name) : graph_(std::make_shared<Graph>()) {
    graph_->name = std::move(name);
  }

  ValueHandle input(const std::string& name, int dtype, nb::handle shape, const std::string& role,
                    bool requires_grad) {
    const std::optional<DType> type = dtype_from_onnx(dtype);
    if (!type)
      throw DTypeError(str("input '", name, "': element type ", dtype, " is not supported"));
    return {graph_, graph_->add_input(
                        {.role = input_role(role), .target = name, .requires_grad = requires_grad},
                        name, *type, parse_shape(shape))};
  }

  ValueHandle constant(nb::handle array, const std::string& name) {
    return {graph_, graph_->add_constant(copy_to_tensor_data(array, str("constant ", name)), name)};
  }

  nb::object node(const std::string& op, nb::list inputs, nb::dict attrs, int outputs,
                  const std::string& name, const std::string& domain) {
    if (outputs < 1 || outputs > kMostOutputs) {
      throw InvalidModelError(str("[", op, " '", name, "'] ", outputs, " outputs"));
    }
    const OpDef& def = op_registry().get(domain, op);
    std::vector<ValueId> ids;
    for (nb::handle input : inputs) {
      if (input.is_none()) {
        ids.push_back(kNoValue);
        continue;
      }
      const ValueHandle& handle = nb::cast<const ValueHandle&>(input);
      if (handle.graph != graph_) {
        throw InvalidModelError(str("[", op, " '", name, "'] an input belongs to another graph"));
      }
      ids.push_back(handle.id);
    }
    GraphBuilder builder(*graph_);
    builder.set_layer(name);
    builder.set_checkpoint(checkpoint_);
    const std::vector<ValueId> made =
        builder.node(domain, op, std::move(ids), attributes_from(attrs, def),
                     std::vector<bool>(static_cast<size_t>(outputs), true));
    if (outputs == 1) return nb::cast(ValueHandle{graph_, made[0]});
    nb::list result;
    for (ValueId id : made) result.append(nb::cast(ValueHandle{graph_, id}));
    return nb::tuple(result);
  }

  void set_checkpoint(int number) { checkpoint_ = number; }

  void output(const ValueHandle& value, const std::string& name, const std::string& role,
              const std::string& target) {
    graph_->add_output(
        {.value = value.id, .name = name, .role = output_role(role), .target = target});
  }

  std::shared_ptr<Graph> finish() {
    // What the caller gets comes first, so that positions among the user outputs are positions
    // among all.
    std::ranges::stable_partition(graph_->outputs(), [](const GraphOutput& output) {
      return output.role == OutputRole::user;
    });
    graph_->remove_dead_nodes();
    graph_->sort();
    verify(*graph_);
    return graph_;
  }

 private:
  std::shared_ptr<Graph> graph_;
  int checkpoint_ = 0;
};

nb::list describe_inputs(const Graph& graph) {
  nb::list result;
  for (const GraphInput& input : graph.inputs()) {
    const Value& value = graph.value(input.value);
    nb::dict row;
    row["name"] = value.name;
    row["role"] = std::string(name_of(input.role));
    row["target"] = input.target;
    row["dtype"] = static_cast<int>(value.dtype);
    row["shape"] = shape_list(value.shape);
    row["requires_grad"] = input.requires_grad;
    result.append(row);
  }
  return result;
}

nb::list describe_outputs(const Graph& graph) {
  nb::list result;
  for (const GraphOutput& output : graph.outputs()) {
    const Value& value = graph.value(output.value);
    nb::dict row;
    row["name"] = output.name;
    row["role"] = std::string(name_of(output.role));
    row["target"] = output.target;
    row["value"] = graph.value(output.value).name;
    row["dtype"] = static_cast<int>(value.dtype);
    row["shape"] = shape_list(value.shape);
    result.append(row);
  }
  return result;
}

nb::list describe_nodes(const Graph& graph) {
  nb::list result;
  for (NodeId id : graph.order()) {
    const Node& node = graph.node(id);
    nb::dict row;
    row["id"] = id;
    row["op"] = node.op;
    row["domain"] = node.domain;
    row["name"] = node.name;
    row["phase"] = node.phase == Phase::forward ? "forward" : "backward";
    nb::list inputs;
    for (ValueId input : node.inputs) {
      inputs.append(input == kNoValue ? std::string() : graph.value(input).name);
    }
    nb::list outputs;
    for (ValueId output : node.outputs) {
      outputs.append(output == kNoValue ? std::string() : graph.value(output).name);
    }
    row["inputs"] = inputs;
    row["outputs"] = outputs;
    result.append(row);
  }
  return result;
}

nb::dict describe_note(const PassNote& note) {
  nb::dict row;
  row["pass"] = note.pass;
  row["taken"] = note.taken;
  row["result"] = note.result;
  row["reason"] = note.reason;
  nb::list nodes;
  for (const NotedNode& node : note.nodes) {
    nodes.append(nb::make_tuple(node.id, node.op, node.name));
  }
  row["nodes"] = nodes;
  return row;
}

// Of a device's name, as of `_core.Session`.
Processor processor_of(const std::string& device) {
  return device == "cpu" ? Processor::cpu : Processor::gpu;
}

// Runs the passes of a stage; returns what each did to the number of nodes, and the rewrites that
// they took and refused.
nb::tuple explain_passes(Graph& graph, const std::string& stage, const std::string& device) {
  std::vector<PassResult> results;
  std::vector<PassNote> notes;
  {
    nb::gil_scoped_release release;
    PassNotes collected;
    results = run_pipeline(graph, stage, StagePart::whole, processor_of(device));
    notes = collected.all();
  }
  nb::list passes;
  for (const PassResult& result : results) {
    nb::dict row;
    row["name"] = result.name;
    row["changed"] = result.changed;
    row["seconds"] = result.seconds;
    row["nodes_before"] = result.nodes_before;
    row["nodes_after"] = result.nodes_after;
    passes.append(row);
  }
  nb::list described;
  for (const PassNote& note : notes) described.append(describe_note(note));
  return nb::make_tuple(passes, described);
}

}  // namespace

void init_graph(nb::module_& module) {
  nb::class_<ValueHandle>(module, "Value")
      .def_prop_ro("name", [](const ValueHandle& v) { return v.graph->value(v.id).name; })
      .def_prop_ro(
          "dtype",
          [](const ValueHandle& v) { return static_cast<int>(v.graph->value(v.id).dtype); })
      .def_prop_ro("rank", [](const ValueHandle& v) { return v.graph->value(v.id).shape.size(); })
      .def_prop_ro("shape",
                   [](const ValueHandle& v) { return shape_list(v.graph->value(v.id).shape); })
      .def_prop_ro("known", [](const ValueHandle& v) -> nb::object {
        const auto& known = v.graph->value(v.id).known;
        return known ? nb::object(shape_list(*known)) : nb::none();
      });

  nb::class_<PythonGraphBuilder>(module, "GraphBuilder")
      .def(nb::init<std::string>(), nb::arg("name") = "")
      .def("input", &PythonGraphBuilder::input, nb::arg("name"), nb::arg("dtype"), nb::arg("shape"),
           nb::arg("role"), nb::arg("requires_grad") = false)
      .def("constant", &PythonGraphBuilder::constant, nb::arg("array"), nb::arg("name") = "")
      .def("node", &PythonGraphBuilder::node, nb::arg("op"), nb::arg("inputs"),
           nb::arg("attrs") = nb::dict(), nb::arg("outputs") = 1, nb::arg("name") = "",
           nb::arg("domain") = "")
      .def("set_checkpoint", &PythonGraphBuilder::set_checkpoint, nb::arg("number"))
      .def("output", &PythonGraphBuilder::output, nb::arg("value"), nb::arg("name"),
           nb::arg("role"), nb::arg("target") = "")
      .def("finish", &PythonGraphBuilder::finish);

  nb::class_<Graph>(module, "Graph")
      .def_ro("name", &Graph::name)
      .def_prop_ro("inputs", &describe_inputs)
      .def_prop_ro("outputs", &describe_outputs)
      .def("nodes", &describe_nodes)
      .def_prop_ro("num_nodes", [](const Graph& g) { return g.order().size(); })
      .def("copy", [](const Graph& g) { return std::make_shared<Graph>(g); })
      .def("verify", [](const Graph& g) { verify(g); })
      .def("to_standard_operators", [](Graph& g) { to_standard_operators(g); })
      .def("text", [](const Graph& g) { return print_graph(g); })
      .def_static(
          "parse",
          [](const std::string& text) { return std::make_shared<Graph>(parse_graph(text)); })
      .def("set_requires_grad",
           [](Graph& g, const std::map<std::string, bool>& flags) {
             for (GraphInput& input : g.inputs()) {
               auto found = flags.find(g.value(input.value).name);
               if (found != flags.end()) input.requires_grad = found->second;
             }
           })
      .def("checkpoint_layers", &checkpoint_layers, nb::arg("count"))
      .def("differentiable_outputs", [](const Graph& g) { return differentiable_outputs(g); })
      .def("gradient_paths", [](const Graph& g) { return gradient_paths(g); })
      .def("value_paths", [](const Graph& g) { return value_paths(g); })
      .def("differentiable_input_updates",
           [](const Graph& g) { return differentiable_input_updates(g); })
      .def(
          "missing_gradients",
          [](const Graph& g, std::vector<size_t> outputs) {
            return missing_gradients(g, {.output_indices = std::move(outputs)});
          },
          nb::arg("output_indices"))
      .def(
          "build_backward",
          [](Graph& g, std::vector<size_t> outputs) {
            nb::gil_scoped_release release;
            build_backward(g, {.output_indices = std::move(outputs)});
            g.remove_dead_nodes();
            g.sort();
          },
          nb::arg("output_indices"))
      .def(
          "run_passes",
          [](Graph& g, const std::string& stage, const std::string& device) {
            std::vector<PassResult> results;
            {
              nb::gil_scoped_release release;
              results = run_pipeline(g, stage, StagePart::whole, processor_of(device));
            }
            nb::list rows;
            for (const PassResult& result : results) {
              rows.append(nb::make_tuple(result.name, result.changed, result.seconds));
            }
            return rows;
          },
          nb::arg("stage"), nb::arg("device") = "cpu")
      .def("explain_passes", &explain_passes, nb::arg("stage"), nb::arg("device") = "cpu")
      .def(
          "mixed_precision",
          [](Graph& g, const std::string& dtype, std::vector<std::string> allow,
             std::vector<std::string> deny, std::vector<std::string> promote) {
            nb::gil_scoped_release release;
            return mixed_precision(g, {.dtype = dtype_from_name(dtype).value_or(DType::undefined),
                                       .allow = std::move(allow),
                                       .deny = std::move(deny),
                                       .promote = std::move(promote)});
          },
          nb::arg("dtype"), nb::arg("allow") = std::vector<std::string>(),
          nb::arg("deny") = std::vector<std::string>(),
          nb::arg("promote") = std::vector<std::string>(),
          "Compute products in 16 bits; see ortrain/passes/mixed_precision.h.");
}

}  // namespace ortrain::python
