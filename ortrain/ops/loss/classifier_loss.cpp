// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/flops.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"
#include "ortrain/ops/loss/class_loss.h"

namespace ortrain::ops {
namespace {

bool differ(const Dim& a, const Dim& b) { return a.is_constant() && b.is_constant() && !(a == b); }

void infer_classifier_loss_grad(InferContext& context) {
  const Shape& logits = context.shape(1);
  const Shape& x = context.shape(4);
  const Shape& weight = context.shape(5);
  if (logits.size() != 2 || x.empty() || weight.size() != 2) {
    throw ShapeError(str("logits, x and weight are [N, C], [..., K] and [C, K], have the shapes ",
                         shape_str(logits), ", ", shape_str(x), ", ", shape_str(weight)));
  }
  check_class_loss(context, 1, 2, context.num_inputs());
  const Dim rows = num_elements(Shape(x.begin(), x.end() - 1));
  if (differ(rows, logits[0]) || differ(weight[0], logits[1]) || differ(weight[1], x.back())) {
    throw ShapeError(str("x ", shape_str(x), " and weight ", shape_str(weight),
                         " do not make logits ", shape_str(logits)));
  }
  check_input_shape(context, 0, loss_shape(context.attrs(), context.shape(2)));
  check_input_shape(context, 3, context.shape(2));
  check_loss_gradient(context, context.dtype(1));
  if (context.has_input(6)) check_input_shape(context, 6, weight);
  context.set_output(0, context.dtype(4), x);
  context.set_output(1, context.dtype(4), weight);
  context.set_output(2, context.dtype(4), {weight[0]});
}

}  // namespace

void register_classifier_loss(OpRegistry& registry) {
  registry.add(
      {.name = "ClassifierLossGrad",
       .domain = std::string(kOrtrainDomain),
       .summary = "The gradients of CrossEntropy(x weight^T + bias, labels) by x[..., K], "
                  "weight[C, K] (added to base) and bias[C], without the gradient of all logits at "
                  "once: rows whose label is ignored are skipped.",
       .inputs = {{"dloss", "L"},
                  {"logits", "T"},
                  {"labels", "I"},
                  {"logsumexp", "U"},
                  {"x", "T"},
                  {"weight", "T"},
                  {"base", "T", Arity::optional}},
       .outputs = {{"dx", "T", Arity::optional},
                   {"dweight", "T", Arity::optional},
                   {"dbias", "T", Arity::optional}},
       .attrs = cross_entropy_attributes(),
       .types =
           {{"T", kFloatTypes}, {"I", kIndexTypes}, {"U", kFullFloatTypes}, {"L", kFloatTypes}},
       .infer = infer_classifier_loss_grad,
       .differentiable = false,  // All rows; those without a label are skipped.
       .flops = [](const NodeSpec& s) {
         return 4 * count_of(s.input(1)) * extent_from_end(s.input(5), 1);
       }});
}

}  // namespace ortrain::ops
