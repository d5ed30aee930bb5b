// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/elementwise/elementwise_def.h"
#include "ortrain/ops/elementwise/onnx_dropout.h"

namespace ortrain::ops {

OnnxDropout onnx_dropout(std::optional<double> ratio, std::optional<bool> training,
                         std::optional<int64_t> seed) {
  OnnxDropout result;
  if (!training) {
    throw UnsupportedError("input 'training_mode' must be known before the graph runs");
  }
  result.training = *training;
  if (!result.training) return result;
  if (!ratio) throw UnsupportedError("input 'ratio' must be known before the graph runs");
  if (!(*ratio >= 0.0 && *ratio < 1.0)) {
    throw InvalidModelError(str("ratio ", *ratio, " is outside of [0, 1)"));
  }
  if (!seed && *ratio > 0.0) {
    throw UnsupportedError(
        "training mode without attribute 'seed'; use ortrain::Dropout, which takes a seed per run");
  }
  result.ratio = *ratio;
  result.seed = seed.value_or(0);
  return result;
}

namespace {

double checked_ratio(const AttributeReader& attrs) {
  const double ratio = attrs.float_("ratio");
  if (!(ratio >= 0.0 && ratio <= 1.0)) {
    throw InvalidModelError(str("attribute 'ratio' is ", ratio, ", outside of [0, 1]"));
  }
  return ratio;
}

void check_seed(const InferContext& context) {
  checked_ratio(context.attrs());
  if (context.rank(1) != 0) {
    throw ShapeError(str("'seed' is a scalar, has the shape ", shape_str(context.shape(1))));
  }
}

void infer_dropout(InferContext& context) {
  check_seed(context);
  context.set_output(0, context.dtype(0), context.shape(0));
}

void infer_dropout_mask(InferContext& context) {
  check_seed(context);
  context.set_output(0, DType::boolean, context.shape(0));
}

ExprReg dropout_expression(ExprEmitter& e) {
  return e.builder().dropout(e.input(0), e.input(1), checked_ratio(e.attrs()),
                             e.attrs().int_("stream"));
}

ExprReg dropout_mask_expression(ExprEmitter& e) {
  return e.builder().dropout_mask(e.input(1), checked_ratio(e.attrs()), e.attrs().int_("stream"));
}

// The same seed and stream draw the same mask again.
void dropout_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  g.set_input_grad(
      0, g.own("Dropout", {g.output_grad(0), g.input(1)},
               {{"ratio", g.attrs().float_("ratio")}, {"stream", g.attrs().int_("stream")}}));
}

OpDef seeded_def(std::string name, std::string summary, Expression expression) {
  OpDef def = unary_def(std::move(name), 1, std::move(summary), kFloatTypes, std::move(expression),
                        nullptr);
  def.domain = kOrtrainDomain;
  def.inputs = {{"X", "T"}, {"seed", "int64"}};
  def.attrs = {{"ratio", 0.5}, {"stream", int64_t{0}}};
  def.draws_random_numbers = true;
  return def;
}

// --- the standard operator

std::optional<double> constant_scalar(const GraphBuilder& g, ValueId id) {
  const Value& value = g.value(id);
  if (value.kind != ValueKind::constant) return std::nullopt;
  return value.constant.to_double();
}

void infer_onnx_dropout(InferContext& context) {
  context.set_output(0, context.dtype(0), context.shape(0));
  context.set_output(1, DType::boolean, context.shape(0));
}

void onnx_dropout_gradient(GradContext& g) {
  std::optional<double> ratio = 0.5;
  std::optional<bool> training = false;
  if (g.has_input(1)) ratio = constant_scalar(g, g.input(1));
  if (g.has_input(2)) {
    const std::optional<double> mode = constant_scalar(g, g.input(2));
    training = mode ? std::optional(*mode != 0.0) : std::nullopt;
  }
  const OnnxDropout config = onnx_dropout(ratio, training, g.attrs().optional_int("seed"));
  if (!g.needs_grad(0) || !g.has_output_grad(0)) return;
  if (!config.training || config.ratio == 0.0) {
    g.set_input_grad(0, g.output_grad(0));
    return;
  }
  const ValueId seed = g.constant(TensorData::int_scalar(DType::i64, config.seed));
  g.set_input_grad(0, g.own("Dropout", {g.output_grad(0), seed},
                            {{"ratio", config.ratio}, {"stream", int64_t{0}}}));
}

}  // namespace

void register_dropout(OpRegistry& registry) {
  OpDef dropout = seeded_def(
      "Dropout", "X / (1 - ratio) where a random word keeps the element, else 0; see philox.h.",
      dropout_expression);
  dropout.outputs = {{"Y", "T"}};
  dropout.infer = infer_dropout;
  dropout.gradient = dropout_gradient;
  registry.add(std::move(dropout));

  OpDef mask = seeded_def("DropoutMask", "Which elements Dropout keeps for this seed and stream.",
                          dropout_mask_expression);
  mask.outputs = {{"mask", "bool"}};
  mask.infer = infer_dropout_mask;
  mask.differentiable = false;
  registry.add(std::move(mask));

  OpDef standard;
  standard.name = "Dropout";
  standard.since = 12;
  standard.summary = "Dropout as ONNX has it: training_mode and ratio known, seed an attribute.";
  standard.inputs = {
      {"data", "T"}, {"ratio", "T1", Arity::optional}, {"training_mode", "bool", Arity::optional}};
  standard.outputs = {{"output", "T"}, {"mask", "bool", Arity::optional}};
  standard.attrs = {{"seed", AttributeKind::int_}};
  standard.types = {{"T", kFloatTypes}, {"T1", kFloatTypes}};
  standard.infer = infer_onnx_dropout;
  standard.gradient = onnx_dropout_gradient;
  standard.draws_random_numbers = true;
  registry.add(std::move(standard));
}

}  // namespace ortrain::ops
