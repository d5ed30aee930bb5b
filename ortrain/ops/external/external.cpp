// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::ops {
namespace {

// Sets outputs [first, first + types) from the attribute 'types' and the leading inputs, each of
// which holds the shape of one.
void infer_by_shape_inputs(InferContext& context, size_t first_input, size_t first_output) {
  const std::vector<int64_t>& types = context.attrs().ints("types");
  for (size_t k = 0; k < types.size(); ++k) {
    const std::optional<DType> type = dtype_from_onnx(types[k]);
    if (!type) throw UnsupportedError(str("element type ", types[k], " in attribute 'types'"));
    const size_t input = first_input + k;
    if (!context.has_input(input) || context.dtype(input) != DType::i64 ||
        context.rank(input) != 1) {
      throw InvalidModelError(str("input ", input, " must be an int64 vector, a shape"));
    }
    if (!context.known(input)) {
      throw ShapeError(str("the shape in input ", input, " is not known before the graph runs"));
    }
    context.set_output(first_output + k, *type, *context.known(input));
  }
}

size_t num_results(const AttributeReader& attrs) { return attrs.ints("types").size(); }

void infer_external(InferContext& context) {
  const size_t results = num_results(context.attrs());
  if (context.num_inputs() < results) {
    throw InvalidModelError(str("has ", context.num_inputs(), " inputs, needs a shape for each of ",
                                results, " results"));
  }
  if (context.num_outputs() > results + 1) {
    throw InvalidModelError(str("has ", context.num_outputs(), " outputs, 'types' has ", results,
                                ", and a token may follow"));
  }
  infer_by_shape_inputs(context, 0, 0);
  context.set_output(results, DType::i64, {});
}

void external_gradient(GradContext& g) {
  const size_t results = num_results(g.attrs());
  std::vector<int64_t> results_with_gradient;
  std::vector<ValueId> incoming;
  for (size_t k = 0; k < results && k < g.num_outputs(); ++k) {
    if (!g.has_output_grad(k)) continue;
    results_with_gradient.push_back(static_cast<int64_t>(k));
    incoming.push_back(g.output_grad(k));
  }
  std::vector<int64_t> wanted;
  std::vector<int64_t> types;
  std::vector<ValueId> shapes;
  for (size_t i = results; i < g.num_inputs(); ++i) {
    if (!g.has_input(i) || !g.needs_grad(i)) continue;
    wanted.push_back(static_cast<int64_t>(i - results));
    types.push_back(static_cast<int64_t>(g.dtype(g.input(i))));
    shapes.push_back(g.shape_of(g.input(i)));
  }
  if (incoming.empty() || wanted.empty()) return;
  g.set_forward_attribute("tracked", wanted);
  std::vector<ValueId> inputs{g.output(results)};
  inputs.insert(inputs.end(), shapes.begin(), shapes.end());
  inputs.insert(inputs.end(), incoming.begin(), incoming.end());
  const std::vector<ValueId> gradients =
      g.GraphBuilder::node(kOrtrainDomain, "ExternalGrad", std::move(inputs),
                           {{"callable", g.attrs().string_("callable")},
                            {"types", types},
                            {"operands", wanted},
                            {"results", results_with_gradient}},
                           std::vector<bool>(wanted.size(), true));
  for (size_t i = 0; i < wanted.size(); ++i) {
    g.set_input_grad(results + static_cast<size_t>(wanted[i]), gradients[i]);
  }
}

void infer_external_grad(InferContext& context) {
  const std::vector<int64_t>& operands = context.attrs().ints("operands");
  if (operands.size() != num_results(context.attrs())) {
    throw InvalidModelError(str("'operands' has ", operands.size(), " entries, 'types' has ",
                                num_results(context.attrs())));
  }
  const size_t incoming = context.attrs().ints("results").size();
  if (context.num_inputs() != 1 + operands.size() + incoming ||
      context.num_outputs() > operands.size()) {
    throw InvalidModelError(str("has ", context.num_inputs(), " inputs and ", context.num_outputs(),
                                " outputs for ", operands.size(), " gradients from ", incoming));
  }
  infer_by_shape_inputs(context, 1, 0);
}

}  // namespace

void register_external(OpRegistry& registry) {
  OpDef def;
  def.name = "External";
  def.domain = kOrtrainDomain;
  def.summary =
      "Runs the function that this process knows as `callable`, outside of the engine. The first "
      "inputs are the shapes of its results, of element types `types`; the operands follow. Behind "
      "the "
      "results, a token stands for what the forward keeps for the backward, which is for the "
      "operands "
      "numbered `tracked`. `site` tells the node from the others of its graph.";
  def.inputs = {{"inputs", "T*", Arity::variadic}};
  def.outputs = {{"results", "T*", Arity::variadic}};
  def.attrs = {{"callable", AttributeKind::string_, true},
               {"types", AttributeKind::ints, true},
               {"site", AttributeKind::int_, true},
               {"tracked", std::vector<int64_t>{}}};
  def.types = {{"T*", kAllTypes}};
  def.precision = Precision::keep;
  def.infer = infer_external;
  def.gradient = external_gradient;
  def.draws_random_numbers = true;  // nobody knows
  def.in_files = false;
  registry.add(std::move(def));

  OpDef grad;
  grad.name = "ExternalGrad";
  grad.domain = kOrtrainDomain;
  grad.summary =
      "The gradients of an External node's operands numbered `operands`, of element types `types`, "
      "by the function's own backward. Inputs are the token, the shapes of the gradients, and the "
      "gradients of the results numbered `results`, those of the others being zero.";
  grad.inputs = {{"token", "int64"}, {"inputs", "T*", Arity::variadic}};
  grad.outputs = {{"gradients", "T*", Arity::variadic}};
  grad.attrs = {{"callable", AttributeKind::string_, true},
                {"types", AttributeKind::ints, true},
                {"operands", AttributeKind::ints, true},
                {"results", AttributeKind::ints, true}};
  grad.types = {{"T*", kAllTypes}};
  grad.infer = infer_external_grad;
  grad.draws_random_numbers = true;
  grad.in_files = false;
  registry.add(std::move(grad));
}

}  // namespace ortrain::ops
