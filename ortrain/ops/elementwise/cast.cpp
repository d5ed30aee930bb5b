// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/expand_context.h"
#include "ortrain/ops/elementwise/elementwise_def.h"

namespace ortrain::ops {
namespace {

// The value of a known integer in type `to`, which may not hold it; nullopt if it is open.
std::optional<Dim> cast_contents(const Dim& x, DType to) {
  if (to != DType::boolean) return x;
  return x.is_constant() ? std::optional(Dim(x.is(0) ? 0 : 1)) : std::nullopt;
}

void infer_cast(InferContext& context) {
  const int64_t code = context.attrs().int_("to");
  const std::optional<DType> to = dtype_from_onnx(code);
  if (!to) throw UnsupportedError(str("element type ", code, " in attribute 'to'"));
  context.set_output(0, *to, context.shape(0));
  infer_contents(context, [to = *to](std::span<const Dim> x) { return cast_contents(x[0], to); });
}

void cast_gradient(GradContext& g) {
  g.set_input_grad(0, g.cast(g.output_grad(0), g.dtype(g.input(0))));
}

void infer_identity(InferContext& context) {
  infer_same_as_input(context);
  if (context.known(0)) context.set_known(0, *context.known(0));
}

OpDef identity_def(std::string name, int since, std::string summary, Gradient gradient) {
  OpDef def;
  def.name = std::move(name);
  def.since = since;
  def.summary = std::move(summary);
  def.inputs = {{"input", "T"}};
  def.outputs = {{"output", "T"}};
  def.types = {{"T", kAllTypes}};
  def.infer = infer_identity;
  def.gradient = std::move(gradient);
  return def;
}

}  // namespace

void register_cast(OpRegistry& registry) {
  OpDef cast = unary_def(
      "Cast", 6, "Converts the element type.", kAllTypes,
      [](ExprEmitter& e) { return e.builder().convert(e.input(0), e.result()); }, cast_gradient);
  cast.inputs = {{"input", "T1"}};
  cast.outputs = {{"output", "T2"}};
  cast.attrs = {{"to", AttributeKind::int_, true}, {"saturate", int64_t{1}}};
  cast.types = {{"T1", kAllTypes}, {"T2", kAllTypes}};
  cast.infer = infer_cast;
  registry.add(std::move(cast));

  registry.add(identity_def("Identity", 1, "The input itself.",
                            [](GradContext& g) { g.set_input_grad(0, g.output_grad(0)); }));
  OpDef stop =
      identity_def("StopGradient", 1, "The input itself; no gradient flows back.", nullptr);
  stop.domain = kOrtrainDomain;
  stop.differentiable = false;
  stop.standard_form = [](ExpandContext& e) {
    return std::vector{e.unary("Identity", e.input(0))};
  };
  registry.add(std::move(stop));
}

}  // namespace ortrain::ops
