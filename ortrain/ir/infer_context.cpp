// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/infer_context.h"

#include <algorithm>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/error.h"

namespace ortrain {
namespace {

// Bytes of the expressions in a value's shape, beyond which it is refused, and in its contents,
// beyond which they are unknown.
constexpr size_t kMaxShapeWeight = size_t{1} << 17;
constexpr size_t kMaxContentsWeight = size_t{1} << 15;

size_t weight_of(const std::vector<Dim>& dims) {
  size_t weight = 0;
  for (const Dim& dim : dims) weight += dim.weight();
  return weight;
}

bool holds(DType dtype, const Dim& element) {
  // Extents fit into 32 bits, or no tensor of that shape could be made.
  if (!element.is_constant()) return dtype == DType::i32 || dtype == DType::i64;
  const int64_t value = element.constant();
  if (dtype == DType::boolean) return value == 0 || value == 1;
  if (!is_integer(dtype)) return false;
  const bool is_signed = is_signed_integer(dtype);
  const int bits = static_cast<int>(8 * size_of(dtype)) - (is_signed ? 1 : 0);
  if (value < 0 && !is_signed) return false;
  return bits >= 63 || (value < int64_t{1} << bits && value >= -(int64_t{1} << bits));
}

// Whoever reads contents relies on one for each element. What leaves the type wraps when it runs.
bool are_contents_of(const InferredValue& value, const std::vector<Dim>& contents) {
  const Shape& shape = value.shape;
  const bool counts_fit =
      shape.empty() ? contents.size() == 1
                    : shape.size() == 1 && shape[0].is(static_cast<int64_t>(contents.size()));
  return counts_fit && contents.size() <= kMaxKnown && weight_of(contents) <= kMaxContentsWeight &&
         std::ranges::all_of(contents, [&](const Dim& x) { return holds(value.dtype, x); });
}

void drop_wrong_contents(std::vector<InferredValue>& values) {
  for (InferredValue& value : values) {
    if (value.known && !are_contents_of(value, *value.known)) value.known.reset();
  }
}

bool dtype_fits(const OpDef& def, const std::string& type, DType dtype,
                std::map<std::string, DType>& bound, std::string& expected) {
  auto variable = def.types.find(type);
  if (variable == def.types.end()) {
    expected = type;
    return name_of(dtype) == type;
  }
  auto [binding, fresh] = bound.emplace(type, dtype);
  if (!fresh && binding->second != dtype) {
    expected = name_of(binding->second);
    return false;
  }
  expected = "another type";
  return variable->second.contains(dtype);
}

void check_inputs(const OpDef& def, const std::vector<InferredValue>& inputs) {
  std::map<std::string, DType> bound;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const FormalValue* formal = def.formal_input(i);
    if (formal == nullptr) {
      throw InvalidModelError(
          str("takes at most ", def.inputs.size(), " inputs, has ", inputs.size()));
    }
    if (inputs[i].dtype == DType::undefined) {
      if (formal->arity != Arity::optional) {
        throw InvalidModelError(str("input '", formal->name, "' is required and absent"));
      }
      continue;
    }
    std::string expected;
    // Variadic inputs of a heterogeneous operator carry a type variable each ("T*").
    if (formal->arity == Arity::variadic && formal->type.ends_with("*")) {
      auto variable = def.types.find(formal->type);
      if (variable != def.types.end() && variable->second.contains(inputs[i].dtype)) continue;
    }
    if (!dtype_fits(def, formal->type, inputs[i].dtype, bound, expected)) {
      throw DTypeError(
          str("input '", formal->name, "' is ", name_of(inputs[i].dtype), ", expected ", expected));
    }
  }
  for (size_t i = inputs.size(); i < def.inputs.size(); ++i) {
    // Of a variadic input there is one at least.
    if (def.inputs[i].arity != Arity::optional) {
      throw InvalidModelError(str("input '", def.inputs[i].name, "' is required and absent"));
    }
  }
}

void check_attributes(const OpDef& def, const Node& node) {
  for (const auto& [name, attribute] : node.attributes) {
    const FormalAttribute* formal = def.find_attribute(name);
    if (formal == nullptr) {
      throw InvalidModelError(str("attribute '", name, "' is not known to this operator"));
    }
    const size_t kind =
        formal->has_default ? formal->default_value.index() : static_cast<size_t>(formal->kind);
    if (attribute.index() != kind) {
      throw InvalidModelError(
          str("attribute '", name, "' is of a wrong kind: ", attribute_kind(attribute)));
    }
  }
  for (const FormalAttribute& formal : def.attrs) {
    if (formal.required && !node.attributes.contains(formal.name)) {
      throw InvalidModelError(str("attribute '", formal.name, "' is required and absent"));
    }
  }
}

}  // namespace

InferContext::InferContext(const OpDef& def, const Node& node, std::vector<InferredValue> inputs)
    : def_(&def), node_(&node), inputs_(std::move(inputs)), outputs_(node.outputs.size()) {
  drop_wrong_contents(inputs_);
}

bool InferContext::has_input(size_t index) const {
  return index < inputs_.size() && inputs_[index].dtype != DType::undefined;
}

DType InferContext::dtype(size_t index) const {
  check(has_input(index), "the input is absent");
  return inputs_[index].dtype;
}

const Shape& InferContext::shape(size_t index) const {
  check(has_input(index), "the input is absent");
  return inputs_[index].shape;
}

const std::optional<std::vector<Dim>>& InferContext::known(size_t index) const {
  static const std::optional<std::vector<Dim>> kUnknown;
  static const std::optional<std::vector<Dim>> kEmpty = std::vector<Dim>();
  if (!has_input(index)) return kUnknown;
  const InferredValue& input = inputs_[index];
  const bool is_empty = is_integer(input.dtype) && input.shape.size() == 1 && input.shape[0].is(0);
  return !input.known && is_empty ? kEmpty : input.known;
}

std::optional<std::vector<int64_t>> InferContext::known_ints(size_t index) const {
  const std::optional<std::vector<Dim>>& contents = known(index);
  if (!contents || !is_constant(*contents)) return std::nullopt;
  return to_dims(*contents);
}

const TensorData& InferContext::constant(size_t index) const {
  static const TensorData kUnknown;
  return has_input(index) ? inputs_[index].constant : kUnknown;
}

const std::string& InferContext::input_name(size_t index) const {
  const FormalValue* const formal = def_->formal_input(index);
  check(formal != nullptr, "the operator has no such input");
  return formal->name;
}

bool InferContext::wants_output(size_t index) const {
  return index < node_->outputs.size() && node_->outputs[index] != kNoValue;
}

void InferContext::set_output(size_t index, DType dtype, Shape shape) {
  if (index >= outputs_.size()) return;  // an optional output that the node does not list
  outputs_[index].dtype = dtype;
  outputs_[index].shape = std::move(shape);
}

void InferContext::set_known(size_t index, std::vector<Dim> known) {
  if (index < outputs_.size()) outputs_[index].known = std::move(known);
}

Dim InferContext::unknown_extent(size_t output, size_t axis) const {
  return Dim::symbol(str("unknown(", node_->op, "#", node_->outputs[output], ".", axis, ")"));
}

void check_node(const OpDef& def, const Node& node, const std::vector<InferredValue>& inputs) {
  with_context(Graph::context(node), [&] {
    check_inputs(def, inputs);
    check_attributes(def, node);
    if (node.outputs.empty()) throw InvalidModelError("has no outputs");
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (def.formal_output(i) == nullptr) {
        throw InvalidModelError(
            str("makes at most ", def.outputs.size(), " outputs, has ", node.outputs.size()));
      }
    }
  });
}

std::vector<InferredValue> infer_node(const OpDef& def, const Node& node,
                                      std::vector<InferredValue> inputs) {
  check_node(def, node, inputs);
  return with_context(Graph::context(node), [&] {
    InferContext context(def, node, std::move(inputs));
    for (size_t i = 0; i < def.outputs.size(); ++i) {
      if (def.outputs[i].arity == Arity::single && !context.wants_output(i)) {
        throw InvalidModelError(str("output '", def.outputs[i].name, "' is required"));
      }
    }
    def.infer(context);
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (node.outputs[i] != kNoValue && context.outputs()[i].dtype == DType::undefined) {
        throw InternalError(str("inference left output ", i, " without a type"));
      }
      for (const Dim& dim : context.outputs()[i].shape) {
        if (dim.is_constant() && dim.constant() < 0) {
          throw ShapeError(
              str("output ", i, " would have the shape ", shape_str(context.outputs()[i].shape)));
        }
      }
      check_extents(context.outputs()[i].shape, size_of(context.outputs()[i].dtype));
      if (weight_of(context.outputs()[i].shape) > kMaxShapeWeight) {
        throw ShapeError(str("the shape of output ", i, " is too complicated"));
      }
    }
    std::vector<InferredValue> outputs = context.outputs();
    drop_wrong_contents(outputs);
    return outputs;
  });
}

void infer_same_as_input(InferContext& context) {
  for (size_t i = 0; i < context.num_outputs(); ++i) {
    context.set_output(i, context.dtype(0), context.shape(0));
  }
}

namespace {

Shape broadcast_inputs(const InferContext& context) {
  Shape shape = context.shape(0);
  for (size_t i = 1; i < context.num_inputs(); ++i) {
    if (context.has_input(i)) shape = broadcast(shape, context.shape(i));
  }
  return shape;
}

}  // namespace

void infer_broadcast(InferContext& context) {
  context.set_output(0, context.dtype(0), broadcast_inputs(context));
}

void infer_broadcast_bool(InferContext& context) {
  context.set_output(0, DType::boolean, broadcast_inputs(context));
}

}  // namespace ortrain
