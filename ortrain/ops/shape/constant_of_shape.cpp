// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

void set_known_ints(InferContext& context, const std::vector<int64_t>& values) {
  context.set_known(0, std::vector<Dim>(values.begin(), values.end()));
}

void infer_constant_of_shape(InferContext& context) {
  const bool given = context.node().attributes.contains("value");
  const TensorData value =
      given ? context.attrs().tensor("value") : TensorData::scalar(DType::f32, 0.0);
  if (value.numel() != 1) throw ShapeError("attribute 'value' must hold one element");
  const Shape shape = required_known(context, 0, "input");
  for (const Dim& extent : shape) {
    if (extent.is_constant() && extent.constant() < 0) {
      throw ShapeError(str("negative extent in ", shape_str(shape)));
    }
  }
  checked_product(shape);
  context.set_output(0, value.dtype(), shape);
  if (kIndexTypes.contains(value.dtype()) && shape.size() <= 1 && is_constant(shape)) {
    const int64_t count = shape.empty() ? 1 : shape[0].constant();
    if (count <= 64) {
      set_known_ints(context,
                     std::vector<int64_t>(static_cast<size_t>(count), value.to_int64s().front()));
    }
  }
}

void infer_constant(InferContext& context) {
  const AttributeReader attrs = context.attrs();
  const Attributes& given = context.node().attributes;
  if (given.size() != 1) {
    throw InvalidModelError(
        str("exactly one attribute must give the value, there are ", given.size()));
  }
  const std::string& form = given.begin()->first;
  if (form == "value") {
    const TensorData& value = attrs.tensor("value");
    context.set_output(0, value.dtype(), to_shape(value.dims()));
    if (kIndexTypes.contains(value.dtype()) && value.dims().size() <= 1 && value.numel() <= 64) {
      set_known_ints(context, value.to_int64s());
    }
  } else if (form == "value_int") {
    context.set_output(0, DType::i64, {});
    context.set_known(0, {Dim(attrs.int_("value_int"))});
  } else if (form == "value_ints") {
    const std::vector<int64_t>& values = attrs.ints("value_ints");
    context.set_output(0, DType::i64, {Dim(static_cast<int64_t>(values.size()))});
    set_known_ints(context, values);
  } else if (form == "value_float") {
    context.set_output(0, DType::f32, {});
  } else if (form == "value_floats") {
    context.set_output(0, DType::f32,
                       {Dim(static_cast<int64_t>(attrs.floats("value_floats").size()))});
  } else {
    throw UnsupportedError(str("constants of the form '", form, "'"));
  }
}

void infer_eye_like(InferContext& context) {
  if (context.rank(0) != 2) {
    throw ShapeError(
        str("the input must be a matrix, it has the shape ", shape_str(context.shape(0))));
  }
  DType dtype = context.dtype(0);
  if (const std::optional<int64_t> code = context.attrs().optional_int("dtype")) {
    const std::optional<DType> wanted = dtype_from_onnx(*code);
    if (!wanted) throw UnsupportedError(str("element type ", *code));
    dtype = *wanted;
  }
  context.set_output(0, dtype, context.shape(0));
}

}  // namespace

void register_constant_of_shape(OpRegistry& registry);
void register_constant_of_shape(OpRegistry& registry) {
  registry.add({.name = "ConstantOfShape",
                .since = 9,
                .summary = "A tensor of the given shape filled with one value.",
                .inputs = {{"input", "int64"}},
                .outputs = {{"output", "T"}},
                .attrs = {{"value", AttributeKind::tensor}},
                .types = {{"T", kAllTypes}},
                .infer = infer_constant_of_shape,
                .differentiable = false});
  registry.add({.name = "Constant",
                .since = 1,
                .summary = "A tensor held by the node; the importer turns it into a constant.",
                .outputs = {{"output", "T"}},
                .attrs = {{"value", AttributeKind::tensor},
                          {"value_int", AttributeKind::int_},
                          {"value_ints", AttributeKind::ints},
                          {"value_float", AttributeKind::float_},
                          {"value_floats", AttributeKind::floats},
                          {"value_string", AttributeKind::string_},
                          {"value_strings", AttributeKind::strings}},
                .types = {{"T", kAllTypes}},
                .infer = infer_constant,
                .differentiable = false});
  registry.add({.name = "EyeLike",
                .since = 9,
                .summary = "Ones on diagonal k, zeros elsewhere, in the shape of a matrix.",
                .inputs = {{"input", "T1"}},
                .outputs = {{"output", "T2"}},
                .attrs = {{"dtype", AttributeKind::int_}, {"k", int64_t{0}}},
                .types = {{"T1", kAllTypes}, {"T2", kAllTypes}},
                .infer = infer_eye_like,
                .differentiable = false});
}

}  // namespace ortrain::ops
