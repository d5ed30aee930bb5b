// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::ops {
namespace {

void infer_cast_each(InferContext& context) {
  const int64_t code = context.attrs().int_("to");
  const std::optional<DType> to = dtype_from_onnx(code);
  if (!to || !is_float(*to))
    throw UnsupportedError(str("element type ", code, " in attribute 'to'"));
  if (context.num_inputs() == 0 || context.num_inputs() != context.num_outputs()) {
    throw InvalidModelError(
        str(context.num_inputs(), " inputs make as many outputs, not ", context.num_outputs()));
  }
  for (size_t i = 0; i < context.num_inputs(); ++i) {
    if (!context.has_input(i)) throw InvalidModelError(str("input ", i, " is absent"));
    if (context.dtype(i) != context.dtype(0)) {
      throw DTypeError(str("input ", i, " is ", name_of(context.dtype(i)), ", input 0 ",
                           name_of(context.dtype(0))));
    }
    context.set_output(i, *to, context.shape(i));
  }
}

void cast_each_gradient(GradContext& g) {
  for (size_t i = 0; i < g.num_inputs(); ++i) {
    if (!g.needs_grad(i) || !g.has_output_grad(i)) continue;
    g.set_input_grad(i, g.cast(g.output_grad(i), g.dtype(g.input(i))));
  }
}

}  // namespace

void register_cast_each(OpRegistry& registry) {
  registry.add({.name = "CastEach",
                .domain = std::string(kOrtrainDomain),
                .summary =
                    "Cast of several tensors of one type to float type `to`: one launch on a "
                    "device.",
                .inputs = {{"inputs", "T", Arity::variadic}},
                .outputs = {{"outputs", "T2*", Arity::variadic}},
                .attrs = {{"to", AttributeKind::int_, true}},
                .types = {{"T", kFloatTypes}, {"T2*", kFloatTypes}},
                .infer = infer_cast_each,
                .gradient = cast_each_gradient});
}

}  // namespace ortrain::ops
