// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "python/src/graph_scope.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ortrain/base/error.h"
#include "ortrain/ir/op_registry.h"
#include "python/src/attribute_conversion.h"
#include "python/src/tensor_exchange.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

const Value& value_of(const ScopedValue& value) { return value.scope->get().value(value.id); }

const Node& node_of(const ScopedNode& node) {
  const Graph& graph = node.scope->get().graph();
  if (!graph.alive(node.id)) throw InvalidModelError("this node is no longer in the graph");
  return graph.node(node.id);
}

nb::tuple values_of(const ScopePtr& scope, const std::vector<ValueId>& ids) {
  nb::list result;
  for (ValueId id : ids) result.append(value_object(scope, id));
  return nb::tuple(result);
}

nb::object binary(const char* op, const ScopedValue& self, nb::handle other, bool swapped) {
  GraphBuilder& builder = self.scope->get();
  const ValueId id = value_from(self.scope, other, self.id);
  const std::vector<ValueId> inputs =
      swapped ? std::vector<ValueId>{id, self.id} : std::vector<ValueId>{self.id, id};
  return value_object(self.scope, builder.op(op, inputs));
}

}  // namespace

GraphBuilder& GraphScope::get() const {
  if (builder == nullptr) {
    throw InvalidModelError("values and nodes hold only while the function runs that got them");
  }
  return *builder;
}

nb::object value_object(const ScopePtr& scope, ValueId id) {
  return id == kNoValue ? nb::none() : nb::cast(ScopedValue{scope, id});
}

ValueId value_from(const ScopePtr& scope, nb::handle object, ValueId like) {
  if (object.is_none()) return kNoValue;
  if (like != kNoValue &&
      (nb::isinstance<nb::float_>(object) || nb::isinstance<nb::int_>(object))) {
    GraphBuilder& builder = scope->get();
    const DType type = builder.dtype(like);
    if (is_float(type)) return builder.scalar(type, nb::cast<double>(object));
    if (!nb::isinstance<nb::int_>(object)) {
      throw DTypeError(str("'", builder.value(like).name, "' is ", name_of(type),
                           ": it takes no part in arithmetic with a float"));
    }
    return builder.constant(TensorData::int_scalar(type, nb::cast<int64_t>(object)));
  }
  if (!nb::isinstance<ScopedValue>(object)) {
    throw nb::type_error(
        str("expected a value of the graph, got ", text_of(object.type())).c_str());
  }
  const ScopedValue& value = nb::cast<const ScopedValue&>(object);
  if (value.scope != scope) throw InvalidModelError("a value belongs to another graph");
  return value.id;
}

nb::object add_node(const ScopePtr& scope, const std::string& op, nb::args inputs,
                    const std::string& domain, int outputs, nb::kwargs attributes) {
  if (outputs < 1) throw InvalidModelError(str(op, ": a node has at least one output"));
  std::vector<ValueId> ids;
  for (nb::handle input : inputs) ids.push_back(value_from(scope, input));
  while (!ids.empty() && ids.back() == kNoValue) ids.pop_back();
  const OpDef& def = op_registry().get(domain, op);
  const std::vector<ValueId> made =
      scope->get().node(domain, op, std::move(ids), attributes_from(attributes, def),
                        std::vector<bool>(static_cast<size_t>(outputs), true));
  if (outputs == 1) return value_object(scope, made[0]);
  return values_of(scope, made);
}

void init_graph_scope(nb::module_& module) {
  nb::class_<ScopedValue>(module, "ScopedValue")
      .def_prop_ro("name", [](const ScopedValue& v) { return value_of(v).name; })
      .def_prop_ro("dtype",
                   [](const ScopedValue& v) { return static_cast<int>(value_of(v).dtype); })
      .def_prop_ro("rank", [](const ScopedValue& v) { return value_of(v).shape.size(); })
      .def_prop_ro("shape", [](const ScopedValue& v) { return shape_list(value_of(v).shape); })
      .def_prop_ro("constant", [](const ScopedValue& v) { return to_python(value_of(v).constant); })
      .def_prop_ro("producer",
                   [](const ScopedValue& v) -> nb::object {
                     const NodeId producer = value_of(v).producer;
                     return producer == kNoNode ? nb::none()
                                                : nb::cast(ScopedNode{v.scope, producer});
                   })
      .def("__add__", [](const ScopedValue& a, nb::handle b) { return binary("Add", a, b, false); })
      .def("__radd__", [](const ScopedValue& a, nb::handle b) { return binary("Add", a, b, true); })
      .def("__sub__", [](const ScopedValue& a, nb::handle b) { return binary("Sub", a, b, false); })
      .def("__rsub__", [](const ScopedValue& a, nb::handle b) { return binary("Sub", a, b, true); })
      .def("__mul__", [](const ScopedValue& a, nb::handle b) { return binary("Mul", a, b, false); })
      .def("__rmul__", [](const ScopedValue& a, nb::handle b) { return binary("Mul", a, b, true); })
      .def("__truediv__",
           [](const ScopedValue& a, nb::handle b) { return binary("Div", a, b, false); })
      .def("__rtruediv__",
           [](const ScopedValue& a, nb::handle b) { return binary("Div", a, b, true); })
      .def("__pow__", [](const ScopedValue& a, nb::handle b) { return binary("Pow", a, b, false); })
      .def("__neg__",
           [](const ScopedValue& a) { return value_object(a.scope, a.scope->get().neg(a.id)); })
      .def("__eq__",
           [](const ScopedValue& a, nb::handle b) {
             return nb::isinstance<ScopedValue>(b) &&
                    nb::cast<const ScopedValue&>(b).scope == a.scope &&
                    nb::cast<const ScopedValue&>(b).id == a.id;
           })
      .def("__hash__", [](const ScopedValue& a) { return static_cast<int64_t>(a.id); });

  nb::class_<ScopedNode>(module, "ScopedNode")
      .def_prop_ro("op", [](const ScopedNode& n) { return node_of(n).op; })
      .def_prop_ro("domain", [](const ScopedNode& n) { return node_of(n).domain; })
      .def_prop_ro("layer", [](const ScopedNode& n) { return node_of(n).name; })
      .def_prop_ro("is_backward",
                   [](const ScopedNode& n) { return node_of(n).phase == Phase::backward; })
      .def_prop_ro("inputs",
                   [](const ScopedNode& n) { return values_of(n.scope, node_of(n).inputs); })
      .def_prop_ro("outputs",
                   [](const ScopedNode& n) { return values_of(n.scope, node_of(n).outputs); })
      .def_prop_ro("attributes",
                   [](const ScopedNode& n) {
                     nb::dict result;
                     for (const auto& [name, attribute] : node_of(n).attributes) {
                       result[name.c_str()] = to_python(attribute);
                     }
                     return result;
                   })
      .def("__eq__",
           [](const ScopedNode& a, nb::handle b) {
             return nb::isinstance<ScopedNode>(b) &&
                    nb::cast<const ScopedNode&>(b).scope == a.scope &&
                    nb::cast<const ScopedNode&>(b).id == a.id;
           })
      .def("__hash__", [](const ScopedNode& a) { return static_cast<int64_t>(a.id); });
}

}  // namespace ortrain::python
