// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/extension/host.h"

#include <algorithm>

#include "ortrain/base/error.h"
#include "ortrain/cpu/threads.h"

namespace ortrain::extension {
namespace {

struct LastError {
  int32_t kind = kOrtrainErrorInternal;
  std::string message;
  bool is_ours = false;  // a function of the engine failed as it should not
};

thread_local LastError last_error;

InferContext& infer_of(OrtrainContext* context) {
  if (context->infer == nullptr) throw InvalidModelError("this is for inference functions only");
  return *context->infer;
}

GradContext& gradient_of(OrtrainContext* context) {
  if (context->gradient == nullptr) throw InvalidModelError("this is for gradient functions only");
  return *context->gradient;
}

NodeSpec& spec_of(OrtrainContext* context) {
  if (context->spec == nullptr) throw InvalidModelError("this is for kernels only");
  return *context->spec;
}

void check_index(size_t index, size_t count, const char* what) {
  if (index >= count) throw InvalidModelError(str("there is no ", what, " ", index));
}

ValueId value_in(const GraphBuilder& builder, int32_t value) {
  check_index(static_cast<size_t>(value), builder.graph().num_values(), "value");
  return value;
}

DType type_of(int32_t code) {
  const std::optional<DType> type = dtype_from_onnx(code);
  if (!type) throw DTypeError(str("element type ", code, " is not supported"));
  return *type;
}

OrtrainDim hand_out(OrtrainContext* context, const Dim& dim) {
  if (dim.is_constant()) return {dim.constant(), 0};
  context->dims.push_back(dim);
  return {static_cast<int64_t>(context->dims.size()) - 1, 1};
}

Dim dim_of(OrtrainContext* context, OrtrainDim dim) {
  if (dim.is_symbolic == 0) return dim.value;
  const auto index = static_cast<size_t>(dim.value);
  if (context == nullptr) throw InvalidModelError("an expression without its node");
  check_index(index, context->dims.size(), "expression");
  return context->dims[index];
}

Dim apply(int32_t operation, const Dim& a, const Dim& b) {
  switch (operation) {
    case kOrtrainDimAdd:
      return a + b;
    case kOrtrainDimSub:
      return a - b;
    case kOrtrainDimMul:
      return a * b;
    case kOrtrainDimFloorDiv:
      return floor_div(a, b);
    case kOrtrainDimCeilDiv:
      return ceil_div(a, b);
    case kOrtrainDimMin:
      return min(a, b);
    case kOrtrainDimMax:
      return max(a, b);
    case kOrtrainDimBroadcast:
      return broadcast(a, b);
    default:
      throw InvalidModelError(str("there is no operation ", operation, " on extents"));
  }
}

// --- the functions of OrtrainHost

int32_t add_operator(OrtrainRegistrar* registrar, const OrtrainOperator* op) {
  return guarded([&] { registrar->entries.push_back(entry_of(*op)); });
}

const char* last_error_message() { return last_error.message.c_str(); }
int32_t last_error_kind() { return last_error.kind; }
void set_error(int32_t kind, const char* message) {
  last_error = {kind, message == nullptr ? "" : message, false};
}

int32_t attribute(OrtrainContext* context, const char* name, int32_t kind,
                  OrtrainAttribute* result) {
  return guarded([&] {
    const AttributeReader& attributes = context->attributes;
    const std::string given = required_text(name, "name of an attribute");
    if (result == nullptr) throw InvalidModelError("there is no place for an attribute");
    *result = {};
    result->name = name;
    result->kind = kind;
    switch (kind) {
      case kOrtrainInt:
        result->int_value = attributes.int_(given);
        break;
      case kOrtrainFloat:
        result->float_value = attributes.float_(given);
        break;
      case kOrtrainString:
        result->string_value = attributes.string_(given).c_str();
        break;
      case kOrtrainInts:
        result->ints = attributes.ints(given).data();
        result->count = attributes.ints(given).size();
        break;
      case kOrtrainFloats:
        result->floats = attributes.floats(given).data();
        result->count = attributes.floats(given).size();
        break;
      default:
        throw InvalidModelError(str("attributes have no kind ", kind));
    }
  });
}

int32_t has_attribute(OrtrainContext* context, const char* name) {
  return name != nullptr && context->attributes.has(name) ? 1 : 0;
}

size_t num_inputs(OrtrainContext* context) {
  if (context->infer != nullptr) return context->infer->num_inputs();
  if (context->gradient != nullptr) return context->gradient->num_inputs();
  return context->spec->num_inputs();
}

size_t num_outputs(OrtrainContext* context) {
  if (context->infer != nullptr) return context->infer->num_outputs();
  if (context->gradient != nullptr) return context->gradient->num_outputs();
  return context->spec->num_outputs();
}

int32_t has_input(OrtrainContext* context, size_t index) {
  if (index >= num_inputs(context)) return 0;
  if (context->infer != nullptr) return context->infer->has_input(index) ? 1 : 0;
  if (context->gradient != nullptr) return context->gradient->has_input(index) ? 1 : 0;
  return context->spec->has_input(index) ? 1 : 0;
}

int32_t has_output(OrtrainContext* context, size_t index) {
  if (index >= num_outputs(context)) return 0;
  if (context->infer != nullptr) return context->infer->wants_output(index) ? 1 : 0;
  if (context->gradient != nullptr) {
    return context->gradient->node().outputs[index] != kNoValue ? 1 : 0;
  }
  return context->spec->has_output(index) ? 1 : 0;
}

int32_t input_type(OrtrainContext* context, size_t index, int32_t* type) {
  return guarded([&] {
    if (has_input(context, index) == 0) throw InvalidModelError(str("there is no input ", index));
    if (context->infer != nullptr) {
      *type = static_cast<int32_t>(context->infer->dtype(index));
    } else if (context->gradient != nullptr) {
      *type = static_cast<int32_t>(context->gradient->dtype(context->gradient->input(index)));
    } else {
      *type = static_cast<int32_t>(context->spec->input(index).dtype);
    }
  });
}

int32_t input_rank(OrtrainContext* context, size_t index, size_t* rank) {
  return guarded([&] {
    if (has_input(context, index) == 0) throw InvalidModelError(str("there is no input ", index));
    *rank = infer_of(context).shape(index).size();
  });
}

int32_t input_dim(OrtrainContext* context, size_t index, size_t axis, OrtrainDim* dim) {
  return guarded([&] {
    if (has_input(context, index) == 0) throw InvalidModelError(str("there is no input ", index));
    const Shape& shape = infer_of(context).shape(index);
    check_index(axis, shape.size(), "axis");
    *dim = hand_out(context, shape[axis]);
  });
}

int32_t input_contents(OrtrainContext* context, size_t index, const int64_t** values, size_t* count,
                       int32_t* known) {
  return guarded([&] {
    if (has_input(context, index) == 0) throw InvalidModelError(str("there is no input ", index));
    std::optional<std::vector<int64_t>> found = infer_of(context).known_ints(index);
    *known = found ? 1 : 0;
    context->contents.push_back(found ? std::move(*found) : std::vector<int64_t>());
    *values = context->contents.back().data();
    *count = context->contents.back().size();
  });
}

int32_t dim_operation(OrtrainContext* context, int32_t operation, OrtrainDim a, OrtrainDim b,
                      OrtrainDim* result) {
  return guarded([&] {
    const Dim made = apply(operation, dim_of(context, a), dim_of(context, b));
    // Of two numbers nothing but a number can come.
    *result = context == nullptr ? OrtrainDim{made.constant(), 0} : hand_out(context, made);
  });
}

int32_t dim_equal(OrtrainContext* context, OrtrainDim a, OrtrainDim b) {
  bool equal = false;
  guarded([&] { equal = dim_of(context, a) == dim_of(context, b); });
  return equal ? 1 : 0;
}

int32_t set_output(OrtrainContext* context, size_t index, int32_t type, const OrtrainDim* dims,
                   size_t rank) {
  return guarded([&] {
    Shape shape;
    for (const OrtrainDim& dim : required_list(dims, rank, "extents")) {
      shape.push_back(dim_of(context, dim));
    }
    infer_of(context).set_output(index, type_of(type), std::move(shape));
  });
}

int32_t tensor(OrtrainContext* context, int32_t is_output, size_t index, int32_t* type,
               const int64_t** dims, size_t* rank) {
  return guarded([&] {
    const NodeSpec& spec = spec_of(context);
    if (is_output != 0 ? !spec.has_output(index) : !spec.has_input(index)) {
      throw InvalidModelError(str("there is no ", is_output != 0 ? "output " : "input ", index));
    }
    const TensorSpec& found = is_output != 0 ? spec.output(index) : spec.input(index);
    *type = static_cast<int32_t>(found.dtype);
    *dims = found.dims.data();
    *rank = found.dims.size();
  });
}

int32_t request_workspace(OrtrainContext* context, size_t bytes) {
  return guarded([&] { spec_of(context).request_workspace(bytes_of<char>(bytes)); });
}

int32_t input_value(OrtrainContext* context, size_t index, int32_t* value) {
  return guarded([&] {
    GradContext& gradient = gradient_of(context);
    check_index(index, gradient.num_inputs(), "input");
    *value = gradient.input(index);
  });
}

int32_t output_value(OrtrainContext* context, size_t index, int32_t* value) {
  return guarded([&] {
    GradContext& gradient = gradient_of(context);
    check_index(index, gradient.num_outputs(), "output");
    *value = gradient.output(index);
  });
}

int32_t output_gradient(OrtrainContext* context, size_t index, int32_t* value) {
  return guarded([&] {
    GradContext& gradient = gradient_of(context);
    check_index(index, gradient.num_outputs(), "output");
    *value = gradient.has_output_grad(index) ? gradient.output_grad(index) : kNoValue;
  });
}

int32_t needs_gradient(OrtrainContext* context, size_t index) {
  if (context->gradient == nullptr || index >= context->gradient->num_inputs()) return 0;
  return context->gradient->needs_grad(index) ? 1 : 0;
}

int32_t set_input_gradient(OrtrainContext* context, size_t index, int32_t value) {
  return guarded([&] {
    GradContext& gradient = gradient_of(context);
    gradient.set_foreign_input_grad(index, value_in(gradient, value));
  });
}

Attribute attribute_from(const OrtrainAttribute& attribute) {
  const auto list = [&](const auto* values) {
    const auto given = required_list(values, attribute.count, "numbers of an attribute");
    return std::vector(given.begin(), given.end());
  };
  switch (attribute.kind) {
    case kOrtrainInt:
      return attribute.int_value;
    case kOrtrainFloat:
      return attribute.float_value;
    case kOrtrainString:
      return required_text(attribute.string_value, "text of an attribute");
    case kOrtrainInts:
      return list(attribute.ints);
    case kOrtrainFloats:
      return list(attribute.floats);
    default:
      throw InvalidModelError(str("an attribute has kind ", attribute.kind, ", which is none"));
  }
}

int32_t add_node(OrtrainContext* context, const char* domain, const char* name,
                 const int32_t* inputs, size_t num_inputs, const OrtrainAttribute* attributes,
                 size_t num_attributes, int32_t* outputs, size_t num_outputs) {
  return guarded([&] {
    GradContext& gradient = gradient_of(context);
    std::vector<ValueId> values;
    for (const int32_t input : required_list(inputs, num_inputs, "inputs")) {
      values.push_back(input == kNoValue ? kNoValue : value_in(gradient, input));
    }
    Attributes given;
    for (const OrtrainAttribute& attribute :
         required_list(attributes, num_attributes, "attributes")) {
      given.emplace(required_text(attribute.name, "name of an attribute"),
                    attribute_from(attribute));
    }
    const std::span<int32_t> results = required_list(outputs, num_outputs, "outputs");
    const std::vector<ValueId> made =
        gradient.node(required_text(domain, "domain"), required_text(name, "name of an operator"),
                      std::move(values), std::move(given), std::vector<bool>(num_outputs, true));
    std::ranges::copy(made, results.begin());
  });
}

int32_t add_scalar(OrtrainContext* context, int32_t type, double number, int32_t* value) {
  return guarded([&] { *value = gradient_of(context).scalar(type_of(type), number); });
}

int32_t add_int64s(OrtrainContext* context, const int64_t* numbers, size_t count, int32_t* value) {
  return guarded([&] {
    const auto given = required_list(numbers, count, "numbers");
    *value = gradient_of(context).int64s({given.begin(), given.end()});
  });
}

int32_t reduce_to_shape_of(OrtrainContext* context, int32_t value, int32_t like, int32_t* result) {
  return guarded([&] {
    GradContext& gradient = gradient_of(context);
    *result =
        gradient.reduce_foreign_to_shape_of(value_in(gradient, value), value_in(gradient, like));
  });
}

int32_t value_type(OrtrainContext* context, int32_t value, int32_t* type) {
  return guarded([&] {
    GradContext& gradient = gradient_of(context);
    *type = static_cast<int32_t>(gradient.dtype(value_in(gradient, value)));
  });
}

int32_t value_rank(OrtrainContext* context, int32_t value, size_t* rank) {
  return guarded([&] {
    GradContext& gradient = gradient_of(context);
    *rank = gradient.shape(value_in(gradient, value)).size();
  });
}

void parallel_for(int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t),
                  void* argument) {
  cpu::parallel_for(count, grain, [&](int64_t begin, int64_t end) { body(argument, begin, end); });
}

}  // namespace

const OrtrainHost& host() {
  static const OrtrainHost table{
      .abi = kOrtrainExtensionAbi,
      .version = "ortrain",
      .add_operator = add_operator,
      .last_error = last_error_message,
      .last_error_kind = last_error_kind,
      .set_error = set_error,
      .attribute = attribute,
      .has_attribute = has_attribute,
      .num_inputs = num_inputs,
      .num_outputs = num_outputs,
      .has_input = has_input,
      .has_output = has_output,
      .input_type = input_type,
      .input_rank = input_rank,
      .input_dim = input_dim,
      .input_contents = input_contents,
      .dim_operation = dim_operation,
      .dim_equal = dim_equal,
      .set_output = set_output,
      .tensor = tensor,
      .request_workspace = request_workspace,
      .input_value = input_value,
      .output_value = output_value,
      .output_gradient = output_gradient,
      .needs_gradient = needs_gradient,
      .set_input_gradient = set_input_gradient,
      .add_node = add_node,
      .add_scalar = add_scalar,
      .add_int64s = add_int64s,
      .reduce_to_shape_of = reduce_to_shape_of,
      .value_type = value_type,
      .value_rank = value_rank,
      .parallel_for = parallel_for,
  };
  return table;
}

std::string required_text(const char* given, const char* what) {
  if (given == nullptr) throw InvalidModelError(str("there is no ", what));
  return given;
}

void forget_last_error() {
  last_error = {kOrtrainErrorInternal, "the library's function failed and gave no reason", false};
}

void throw_last_error() {
  const std::string message = last_error.message;
  switch (last_error.kind) {
    case kOrtrainErrorModel:
      throw InvalidModelError(message);
    case kOrtrainErrorShape:
      throw ShapeError(message);
    case kOrtrainErrorType:
      throw DTypeError(message);
    case kOrtrainErrorIndex:
      throw IndexError(message);
    case kOrtrainErrorUnsupported:
      throw UnsupportedError(message);
    default:
      if (last_error.is_ours) throw InternalError(message);
      throw Error(message);
  }
}

int32_t remember_error() noexcept {
  const auto keep = [](int32_t kind, const char* message) {
    last_error = {kind, message, kind == kOrtrainErrorInternal};
  };
  try {
    throw;
  } catch (const InvalidModelError& error) {
    keep(kOrtrainErrorModel, error.what());
  } catch (const ShapeError& error) {
    keep(kOrtrainErrorShape, error.what());
  } catch (const DTypeError& error) {
    keep(kOrtrainErrorType, error.what());
  } catch (const IndexError& error) {
    keep(kOrtrainErrorIndex, error.what());
  } catch (const UnsupportedError& error) {
    keep(kOrtrainErrorUnsupported, error.what());
  } catch (const std::exception& error) {
    keep(kOrtrainErrorInternal, error.what());
  } catch (...) {
    keep(kOrtrainErrorInternal, "unknown error");
  }
  return 1;
}

}  // namespace ortrain::extension
