// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"
#include "ortrain/ops/loss/class_loss.h"

namespace ortrain::ops {
namespace {

void infer_nll(InferContext& context) {
  check_class_loss(context, 0, 1, 2);
  context.set_output(0, context.dtype(0), loss_shape(context.attrs(), context.shape(1)));
}

void nll_gradient(GradContext& g) {
  if (g.needs_grad(2)) {
    throw UnsupportedError(
        str(Graph::context(g.node()), "the gradient of class weights is not supported"));
  }
  if (!g.needs_grad(0)) return;
  Attributes attributes{{"reduction", g.attrs().string_("reduction")}};
  if (const auto ignored = g.attrs().optional_int("ignore_index")) {
    attributes["ignore_index"] = *ignored;
  }
  g.set_input_grad(0, g.own("NegativeLogLikelihoodLossGrad",
                            {g.output_grad(0), g.input(1), g.shape_of(g.input(0)), g.input(2)},
                            std::move(attributes)));
}

void infer_nll_grad(InferContext& context) {
  const auto& known = context.known(2);
  if (!known) throw UnsupportedError("the shape of the scores must be known before the run");
  const Shape scores(known->begin(), known->end());
  if (scores.empty()) throw ShapeError("scores need a dimension of classes");
  const size_t class_axis = scores.size() == 1 ? 0 : 1;
  Shape labels = scores;
  labels.erase(labels.begin() + static_cast<int64_t>(class_axis));
  check_input_shape(context, 1, labels);
  check_input_shape(context, 0, loss_shape(context.attrs(), context.shape(1)));
  if (context.has_input(3)) check_input_shape(context, 3, {scores[class_axis]});
  context.set_output(0, context.dtype(0), scores);
}

// dx = scatter(-w dloss): the incoming gradient at the labels, through the forward operator itself.
void nll_grad_gradient(GradContext& g) {
  if (g.needs_grad(3)) {
    throw UnsupportedError(
        str(Graph::context(g.node()), "the gradient of class weights is not supported"));
  }
  if (!g.needs_grad(0)) return;
  Attributes attributes{{"reduction", g.attrs().string_("reduction")}};
  if (const auto ignored = g.attrs().optional_int("ignore_index")) {
    attributes["ignore_index"] = *ignored;
  }
  g.set_input_grad(0, g.op("NegativeLogLikelihoodLoss", {g.output_grad(0), g.input(1), g.input(3)},
                           std::move(attributes)));
}

}  // namespace

void register_nll_loss(OpRegistry& registry) {
  registry.add(
      {.name = "NegativeLogLikelihoodLoss",
       .since = 12,
       .summary = "-weight[target] input[target] over the class dimension.",
       .inputs = {{"input", "T"}, {"target", "I"}, {"weight", "T", Arity::optional}},
       .outputs = {{"loss", "T"}},
       .attrs = {{"reduction", std::string("mean")}, {"ignore_index", AttributeKind::int_}},
       .types = {{"T", kFloatTypes}, {"I", kIndexTypes}},
       .precision = Precision::deny,
       .infer = infer_nll,
       .gradient = nll_gradient});
  registry.add(
      {.name = "NegativeLogLikelihoodLossGrad",
       .domain = std::string(kOrtrainDomain),
       .summary = "-weight[target] dloss at the targets of a tensor of the given shape, zero "
                  "elsewhere.",
       .inputs =
           {{"dloss", "T"}, {"target", "I"}, {"shape", "int64"}, {"weight", "T", Arity::optional}},
       .outputs = {{"dinput", "T"}},
       .attrs = {{"reduction", std::string("mean")}, {"ignore_index", AttributeKind::int_}},
       .types = {{"T", kFloatTypes}, {"I", kIndexTypes}},
       .infer = infer_nll_grad,
       .gradient = nll_grad_gradient});
}

}  // namespace ortrain::ops
