// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"
#include "ortrain/ops/loss/class_loss.h"

namespace ortrain::ops {
namespace {

void check_smoothing(const AttributeReader& attrs) {
  const double smoothing = attrs.float_("label_smoothing");
  if (!(smoothing >= 0.0 && smoothing <= 1.0)) {
    throw InvalidModelError(
        str("attribute 'label_smoothing' is ", smoothing, ", outside of [0, 1]"));
  }
}

void infer_cross_entropy(InferContext& context) {
  check_class_loss(context, 0, 1, 2);
  check_smoothing(context.attrs());
  context.set_output(0, loss_type(context.attrs(), context.dtype(0)),
                     loss_shape(context.attrs(), context.shape(1)));
  context.set_output(1, full_type(context.dtype(0)), context.shape(1));
}

Attributes options_of(const AttributeReader& attrs) {
  return {{"reduction", attrs.string_("reduction")},
          {"ignore_index", attrs.int_("ignore_index")},
          {"label_smoothing", attrs.float_("label_smoothing")},
          {"full_loss", attrs.int_("full_loss")}};
}

void refuse_weight_gradient(const GradContext& g) {
  if (g.needs_grad(2)) {
    throw UnsupportedError(
        str(Graph::context(g.node()), "the gradient of class weights is not supported"));
  }
}

void cross_entropy_gradient(GradContext& g) {
  refuse_weight_gradient(g);
  if (g.has_output_grad(1)) {
    throw UnsupportedError(
        str(Graph::context(g.node()), "the gradient of 'logsumexp' is not supported"));
  }
  if (!g.needs_grad(0) || !g.has_output_grad(0)) return;
  g.set_input_grad(0, g.own("CrossEntropyGrad",
                            {g.output_grad(0), g.input(0), g.input(1), g.output(1), g.input(2)},
                            options_of(g.attrs())));
}

void infer_cross_entropy_grad(InferContext& context) {
  check_class_loss(context, 1, 2, 4);
  check_smoothing(context.attrs());
  check_input_shape(context, 0, loss_shape(context.attrs(), context.shape(2)));
  if (context.has_input(3)) check_input_shape(context, 3, context.shape(2));
  if (context.has_input(3) && context.dtype(3) != full_type(context.dtype(1))) {
    throw DTypeError(str("'logsumexp' is ", name_of(context.dtype(3))));
  }
  check_loss_gradient(context, context.dtype(1));
  context.set_output(0, context.dtype(1), context.shape(1));
}

// --- the standard operator

void infer_softmax_cross_entropy(InferContext& context) {
  check_class_loss(context, 0, 1, 2);
  context.set_output(0, context.dtype(0), loss_shape(context.attrs(), context.shape(1)));
  context.set_output(1, context.dtype(0), context.shape(0));
}

// Labels are never this, so that nothing is ignored.
constexpr int64_t kIgnoreNothing = std::numeric_limits<int64_t>::min();

void softmax_cross_entropy_gradient(GradContext& g) {
  refuse_weight_gradient(g);
  if (!g.needs_grad(0)) return;
  ValueId gradient = kNoValue;
  if (g.has_output_grad(0)) {
    gradient =
        g.own("CrossEntropyGrad", {g.output_grad(0), g.input(0), g.input(1), kNoValue, g.input(2)},
              {{"reduction", g.attrs().string_("reduction")},
               {"ignore_index", g.attrs().optional_int("ignore_index").value_or(kIgnoreNothing)}});
  }
  if (g.has_output_grad(1)) {
    const int64_t axis = g.rank(g.input(0)) == 1 ? 0 : 1;
    const ValueId through_log =
        g.own("LogSoftmaxGrad", {g.output_grad(1), g.output(1)}, {{"axis", axis}});
    gradient = gradient == kNoValue ? through_log : g.add(gradient, through_log);
  }
  if (gradient != kNoValue) g.set_input_grad(0, gradient);
}

std::vector<ValueId> cross_entropy_form(ExpandContext& e) {
  const int64_t ignored = e.attrs().int_("ignore_index");
  const double smoothing = e.attrs().float_("label_smoothing");
  const std::string& reduction = e.attrs().string_("reduction");
  // The standard loss takes batches; a single label stands for one of one.
  const bool single = e.rank(e.input(0)) == 1;
  // The standard loss has the type of its scores.
  const DType type = loss_type(e.attrs(), e.dtype(e.input(0)));
  const ValueId scores = e.cast(e.input(0), type);
  const ValueId logits = single ? e.unsqueeze(scores, {0}) : scores;
  const ValueId labels = single ? e.unsqueeze(e.input(1), {0}) : e.input(1);
  const auto per_label = [&](ValueId loss) { return single ? e.squeeze(loss, {0}) : loss; };
  const auto loss = [&](const std::string& by) {
    std::vector<ValueId> inputs{logits, labels};
    if (e.has_input(2)) inputs.push_back(e.cast(e.input(2), type));
    return e.op("SoftmaxCrossEntropyLoss", inputs, {{"ignore_index", ignored}, {"reduction", by}});
  };
  ValueId logsumexp = kNoValue;
  if (e.wants_output(1)) {
    throw UnsupportedError("its second output has no form in standard operators");
  }
  if (smoothing == 0.0) {
    const ValueId plain = loss(reduction);
    return {reduction == "none" ? per_label(plain) : plain, logsumexp};
  }
  if (e.has_input(2)) {
    throw UnsupportedError("label_smoothing with weights has no form in standard operators");
  }
  // Beyond 32 bits there is no label of that type to ignore.
  const bool can_stand =
      e.dtype(labels) != DType::i32 || (ignored >= INT32_MIN && ignored <= INT32_MAX);
  const ValueId kept = can_stand
                           ? e.op("Not", {e.op("Equal", {labels, e.constant(TensorData::int_scalar(
                                                                     e.dtype(labels), ignored))})})
                           : e.op("Equal", {labels, labels});
  const ValueId log_softmax = e.op("LogSoftmax", {logits}, {{"axis", int64_t{1}}});
  const ValueId spread = e.neg(e.reduce("ReduceMean", log_softmax, {1}, false));
  const ValueId both = e.add(e.mul(loss("none"), 1.0 - smoothing), e.mul(spread, smoothing));
  const ValueId each = e.where(kept, both, e.zeros_like(both));
  if (reduction == "none") return {per_label(each), logsumexp};
  const ValueId sum = e.reduce_sum(each, {}, false);
  if (reduction == "sum") return {sum, logsumexp};
  return {e.div(sum, e.reduce_sum(e.cast(kept, e.dtype(each)), {}, false)), logsumexp};
}

}  // namespace

void register_cross_entropy(OpRegistry& registry) {
  registry.add(
      {.name = "CrossEntropy",
       .domain = std::string(kOrtrainDomain),
       .summary =
           "Cross entropy of softmax(logits[N, C, d...]) and labels[N, d...] as "
           "torch.nn.functional.cross_entropy has it, and log(sum(exp(logits))) per "
           "label (0 where it is ignored). The loss has the type of the logits, with full_loss "
           "that of logsumexp: float for 16-bit logits.",
       .inputs = {{"logits", "T"}, {"labels", "I"}, {"weight", "T", Arity::optional}},
       .outputs = {{"loss", "L"}, {"logsumexp", "U", Arity::optional}},
       .attrs = cross_entropy_attributes(),
       .types = cross_entropy_types(),
       .precision = Precision::deny,
       .infer = infer_cross_entropy,
       .gradient = cross_entropy_gradient,
       .standard_form = cross_entropy_form});
  registry.add({.name = "CrossEntropyGrad",
                .domain = std::string(kOrtrainDomain),
                .summary =
                    "dloss times the gradient of CrossEntropy by its logits: (softmax(logits) "
                    "- target) / normalizer, zeros where the label is ignored.",
                .inputs = {{"dloss", "L"},
                           {"logits", "T"},
                           {"labels", "I"},
                           {"logsumexp", "U", Arity::optional},
                           {"weight", "T", Arity::optional}},
                .outputs = {{"dlogits", "T"}},
                .attrs = cross_entropy_attributes(),
                .types = cross_entropy_types(),
                .infer = infer_cross_entropy_grad});
  registry.add(
      {.name = "SoftmaxCrossEntropyLoss",
       .since = 12,
       .summary = "Weighted negative log likelihood of labels under softmax(scores).",
       .inputs = {{"scores", "T"}, {"labels", "I"}, {"weights", "T", Arity::optional}},
       .outputs = {{"output", "T"}, {"log_prob", "T", Arity::optional}},
       .attrs = {{"reduction", std::string("mean")}, {"ignore_index", AttributeKind::int_}},
       .types = {{"T", kFloatTypes}, {"I", kIndexTypes}},
       .infer = infer_softmax_cross_entropy,
       .gradient = softmax_cross_entropy_gradient});
}

}  // namespace ortrain::ops
