// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ortrain/base/error.h"
#include "ortrain/extension/load_extension.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/text.h"
#include "ortrain/passes/pipeline.h"
#include "python/src/attribute_conversion.h"
#include "python/src/graph_scope.h"
#include "python/src/init.h"
#include "python/src/shared_object.h"
#include "python/src/tensor_exchange.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

// Ends a scope when the function that got it returns or throws.
class OpenScope {
 public:
  explicit OpenScope(GraphBuilder& builder)
      : scope_(std::make_shared<GraphScope>(GraphScope{&builder})) {}
  ~OpenScope() { scope_->builder = nullptr; }
  OpenScope(const OpenScope&) = delete;
  OpenScope& operator=(const OpenScope&) = delete;
  const ScopePtr& get() const { return scope_; }

 private:
  ScopePtr scope_;
};

// What a gradient rule in Python gets.
class GradientBuilder {
 public:
  GradientBuilder(ScopePtr scope, GradContext& context)
      : scope_(std::move(scope)), context_(&context) {}

  const ScopePtr& scope() const { return scope_; }
  GradContext& context() const {
    scope_->get();  // throws when it is over
    return *context_;
  }
  size_t check_index(size_t index, size_t count, const char* what) const {
    if (index >= count) throw IndexError(str("there is no ", what, " ", index));
    return index;
  }

 private:
  ScopePtr scope_;
  GradContext* context_;
};

// Calls a function of the user; an exception gets a line that says where it was called for.
template <typename Argument>
nb::object call(const nb::object& function, Argument argument, const std::string& place) {
  try {
    return function(nb::cast(std::move(argument)));
  } catch (nb::python_error& error) {
    if (nb::hasattr(error.value(), "add_note")) error.value().attr("add_note")("in " + place);
    throw;
  }
}

void run_python_gradient(const nb::object& rule, GradContext& context) {
  nb::gil_scoped_acquire lock;
  const OpenScope scope(context);
  const nb::object result = call(rule, GradientBuilder(scope.get(), context),
                                 str("the gradient rule for ", Graph::context(context.node())));
  nb::list gradients;
  if (nb::isinstance<nb::tuple>(result) || nb::isinstance<nb::list>(result)) {
    for (nb::handle item : result) gradients.append(item);
  } else {
    gradients.append(result);
  }
  if (gradients.size() != context.num_inputs()) {
    throw InvalidModelError(str("the rule returned ", gradients.size(), " gradients, the node has ",
                                context.num_inputs(), " inputs"));
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    const ValueId id = value_from(scope.get(), gradients[i]);
    if (id != kNoValue) context.set_foreign_input_grad(i, id);
  }
}

// What a pass in Python gets.
class GraphEditor {
 public:
  GraphEditor(ScopePtr scope, Graph& graph, GraphBuilder& builder)
      : scope_(std::move(scope)), graph_(&graph), builder_(&builder) {}

  const ScopePtr& scope() const { return scope_; }
  Graph& graph() const {
    scope_->get();
    return *graph_;
  }

  nb::list nodes() const {
    nb::list result;
    for (NodeId id : graph().order()) result.append(nb::cast(ScopedNode{scope_, id}));
    return result;
  }

  nb::list users(const ScopedValue& value) const {
    nb::list result;
    for (NodeId id : graph().order()) {
      for (ValueId input : graph().node(id).inputs) {
        if (input == value.id) result.append(nb::cast(ScopedNode{scope_, id}));
      }
    }
    return result;
  }

  bool is_output(const ScopedValue& value) const {
    for (const GraphOutput& output : graph().outputs()) {
      if (output.value == value.id) return true;
    }
    return false;
  }

  // Nodes added from now on have the layer, the phase and the checkpoint of this one.
  void at(const ScopedNode& node) const {
    const Node& found = graph().node(node.id);
    builder_->set_layer(found.name);
    builder_->set_phase(found.phase);
    builder_->set_checkpoint(found.checkpoint);
  }

  void replace(nb::handle from_object, nb::handle to_object) const {
    const ValueId from = value_from(scope_, from_object);
    const ValueId to = value_from(scope_, to_object);
    if (from == kNoValue || to == kNoValue) throw InvalidModelError("replace: None is no value");
    const Value& old = graph().value(from);
    const Value& now = graph().value(to);
    if (old.dtype != now.dtype) {
      throw DTypeError(str("replace: '", old.name, "' is ", name_of(old.dtype), ", '", now.name,
                           "' is ", name_of(now.dtype)));
    }
    if (old.shape != now.shape) {
      throw ShapeError(str("replace: '", old.name, "' has shape ", shape_str(old.shape), ", '",
                           now.name, "' has shape ", shape_str(now.shape)));
    }
    graph().replace_uses(from, to);
  }

 private:
  ScopePtr scope_;
  Graph* graph_;
  GraphBuilder* builder_;
};

bool run_python_pass(const nb::object& pass, const std::string& name, Graph& graph) {
  nb::gil_scoped_acquire lock;
  GraphBuilder builder(graph);
  const OpenScope scope(builder);
  const nb::object changed =
      call(pass, GraphEditor(scope.get(), graph, builder), str("pass '", name, "'"));
  if (!nb::isinstance<nb::bool_>(changed)) {
    throw nb::type_error(
        str("pass '", name, "' returned no bool: whether it changed the graph").c_str());
  }
  return nb::cast<bool>(changed);
}

nb::object add_constant(const ScopePtr& scope, nb::handle array) {
  return value_object(scope, scope->get().constant(copy_to_tensor_data(array, "constant")));
}

// What gradient rules and passes build with alike.
template <typename Builder>
void def_building(nb::class_<Builder>& builder) {
  builder
      .def(
          "constant",
          [](const Builder& b, nb::handle array) { return add_constant(b.scope(), array); },
          nb::arg("array"))
      .def(
          "op",
          [](const Builder& b, const std::string& op, nb::args inputs, const std::string& domain,
             int outputs, nb::kwargs attributes) {
            return add_node(b.scope(), op, inputs, domain, outputs, attributes);
          },
          nb::arg("op"), nb::arg("inputs"), nb::kw_only(), nb::arg("domain") = "",
          nb::arg("outputs") = 1, nb::arg("attributes"));
}

}  // namespace

void init_extension(nb::module_& module) {
  init_graph_scope(module);

  nb::class_<GradientBuilder> gradient_builder(module, "GradientBuilder");
  def_building(gradient_builder);
  gradient_builder
      .def_prop_ro(
          "attributes",
          [](const GradientBuilder& g) {
            nb::dict result;
            for (const FormalAttribute& formal :
                 op_registry().get(g.context().node().domain, g.context().node().op).attrs) {
              if (formal.has_default) {
                result[formal.name.c_str()] = to_python(formal.default_value);
              }
            }
            for (const auto& [name, attribute] : g.context().node().attributes) {
              result[name.c_str()] = to_python(attribute);
            }
            return result;
          })
      .def_prop_ro("num_inputs", [](const GradientBuilder& g) { return g.context().num_inputs(); })
      .def_prop_ro("num_outputs",
                   [](const GradientBuilder& g) { return g.context().num_outputs(); })
      .def(
          "input",
          [](const GradientBuilder& g, size_t i) {
            g.check_index(i, g.context().num_inputs(), "input");
            return value_object(g.scope(), g.context().input(i));
          },
          nb::arg("index"))
      .def(
          "output",
          [](const GradientBuilder& g, size_t i) {
            g.check_index(i, g.context().num_outputs(), "output");
            return value_object(g.scope(), g.context().output(i));
          },
          nb::arg("index"))
      .def(
          "output_grad",
          [](const GradientBuilder& g, size_t i) {
            g.check_index(i, g.context().num_outputs(), "output");
            return value_object(
                g.scope(), g.context().has_output_grad(i) ? g.context().output_grad(i) : kNoValue);
          },
          nb::arg("index"))
      .def(
          "needs_grad",
          [](const GradientBuilder& g, size_t i) {
            g.check_index(i, g.context().num_inputs(), "input");
            return g.context().needs_grad(i);
          },
          nb::arg("index"))
      .def(
          "reduce_to_shape_of",
          [](const GradientBuilder& g, nb::handle value, nb::handle like) {
            const ValueId from = value_from(g.scope(), value);
            const ValueId to = value_from(g.scope(), like);
            if (from == kNoValue || to == kNoValue) throw InvalidModelError("None is no value");
            return value_object(g.scope(), g.context().reduce_foreign_to_shape_of(from, to));
          },
          nb::arg("value"), nb::arg("like"));

  nb::class_<GraphEditor> graph_editor(module, "GraphEditor");
  def_building(graph_editor);
  graph_editor.def("nodes", &GraphEditor::nodes)
      .def("users", &GraphEditor::users, nb::arg("value"))
      .def("is_output", &GraphEditor::is_output, nb::arg("value"))
      .def("at", &GraphEditor::at, nb::arg("node"))
      .def("replace", &GraphEditor::replace, nb::arg("value"), nb::arg("by"))

      .def("text", [](const GraphEditor& e) { return print_graph(e.graph()); });

  module.def(
      "load_extension",
      [](const std::string& path) {
        nb::gil_scoped_release release;
        return load_extension(path);
      },
      nb::arg("path"));
  module.def(
      "register_gradient",
      [](const std::string& domain, const std::string& name, nb::object rule, bool replace) {
        mutable_op_registry().set_gradient(
            domain, name,
            [held = shared(std::move(rule))](GradContext& context) {
              run_python_gradient(*held, context);
            },
            replace);
      },
      nb::arg("domain"), nb::arg("name"), nb::arg("rule"), nb::arg("replace"));
  module.def(
      "add_pass",
      [](const std::string& stage, const std::string& name, const std::string& summary,
         nb::object pass) {
        Pass made{.name = name,
                  .summary = summary,
                  .run = [held = shared(std::move(pass)), name](Graph& graph) {
                    return run_python_pass(*held, name, graph);
                  }};
        nb::gil_scoped_release release;  // another thread may hold the lock and drop a function
        add_pass(stage, std::move(made));
      },
      nb::arg("stage"), nb::arg("name"), nb::arg("summary"), nb::arg("function"));
  module.def(
      "remove_pass",
      [](const std::string& name) {
        nb::gil_scoped_release release;
        return remove_pass(name);
      },
      nb::arg("name"));
}

}  // namespace ortrain::python
