// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::ops {
namespace {

// Statistics are kept in float32 for 16-bit inputs.
DType statistics_type(DType x) { return x == DType::f64 ? DType::f64 : DType::f32; }

const Dim& channels_of(const Shape& x) {
  if (x.size() < 2) throw ShapeError(str("the input ", shape_str(x), " needs [N, C, ...]"));
  return x[1];
}

void check_channels(const InferContext& context, size_t index, const Dim& channels) {
  if (!context.has_input(index)) return;
  const Shape& shape = context.shape(index);
  const bool fits = shape.size() == 1 &&
                    (shape[0] == channels || !shape[0].is_constant() || !channels.is_constant());
  if (!fits) {
    throw ShapeError(
        str("input ", index, " is ", shape_str(shape), "; it must be [", channels.str(), "]"));
  }
}

void check_same(const InferContext& context, size_t a, size_t b) {
  const Shape &left = context.shape(a), &right = context.shape(b);
  bool fits = left.size() == right.size();
  for (size_t i = 0; fits && i < left.size(); ++i) {
    fits = left[i] == right[i] || !left[i].is_constant() || !right[i].is_constant();
  }
  if (!fits) {
    throw ShapeError(str("dy ", shape_str(left), " must have the shape of x ", shape_str(right)));
  }
}

void infer_training(InferContext& context) {
  const Shape& x = context.shape(0);
  const Dim& channels = channels_of(x);
  for (size_t i = 1; i < 5; ++i) check_channels(context, i, channels);
  Dim count = x[0];
  for (size_t i = 2; i < x.size(); ++i) count = count * x[i];
  const bool normalises =
      context.wants_output(0) || context.wants_output(1) || context.wants_output(2);
  if (count.is(1) && normalises) {
    throw ShapeError(
        str("training needs more than one value per channel; the input is ", shape_str(x)));
  }
  context.set_output(0, context.dtype(0), x);
  for (size_t i = 1; i < 3; ++i) {
    if (!context.wants_output(i)) continue;
    if (!context.has_input(i + 2)) {
      throw InvalidModelError(str("output ", i, " needs the running statistics it updates"));
    }
    context.set_output(i, context.dtype(i + 2), {channels});
  }
  const DType statistics = statistics_type(context.dtype(0));
  context.set_output(3, statistics, {channels});
  context.set_output(4, statistics, {channels});
}

void infer_grad(InferContext& context) {
  const Dim& channels = channels_of(context.shape(1));
  if (context.has_input(0)) check_same(context, 0, 1);
  for (size_t i = 2; i < context.num_inputs(); ++i) check_channels(context, i, channels);
  const DType statistics = context.dtype(3);
  const DType parameters = context.has_input(2) ? context.dtype(2) : statistics;
  context.set_output(0, context.dtype(1), context.shape(1));
  context.set_output(1, parameters, {channels});
  context.set_output(2, parameters, {channels});
}

void infer_batch_normalization(InferContext& context) {
  const Dim& channels = channels_of(context.shape(0));
  for (size_t i = 1; i < 5; ++i) check_channels(context, i, channels);
  context.set_output(0, context.dtype(0), context.shape(0));
  for (size_t i = 1; i < 3; ++i) {
    if (!context.wants_output(i)) continue;
    if (context.attrs().int_("training_mode") == 0) {
      throw InvalidModelError(str("output ", i, " is made with training_mode 1 only"));
    }
    context.set_output(i, context.dtype(i + 2), {channels});
  }
}

void infer_inference_grad(InferContext& context) {
  const Dim& channels = channels_of(context.shape(1));
  check_same(context, 0, 1);
  for (size_t i = 2; i < 5; ++i) check_channels(context, i, channels);
  context.set_output(0, context.dtype(1), context.shape(1));
  for (size_t i = 1; i < 5; ++i) context.set_output(i, context.dtype(i < 3 ? 2 : 3), {channels});
}

void infer_instance(InferContext& context) {
  if (context.rank(0) < 3) {
    throw ShapeError(str("the input ", shape_str(context.shape(0)), " needs [N, C, spatial...]"));
  }
  const Dim& channels = context.shape(0)[1];
  check_channels(context, 1, channels);
  check_channels(context, 2, channels);
  context.set_output(0, context.dtype(0), context.shape(0));
}

void infer_instance_grad(InferContext& context) {
  const Dim& channels = channels_of(context.shape(1));
  check_same(context, 0, 1);
  check_channels(context, 2, channels);
  context.set_output(0, context.dtype(1), context.shape(1));
  context.set_output(1, context.dtype(2), {channels});
  context.set_output(2, context.dtype(2), {channels});
}

void set_grads(GradContext& g, const std::vector<ValueId>& made, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (i < made.size() && made[i] != kNoValue) g.set_input_grad(i, made[i]);
  }
}

bool needs(GradContext& g, size_t index) { return g.has_input(index) && g.needs_grad(index); }

void training_gradient(GradContext& g) {
  const double momentum = g.attrs().float_("momentum");
  const std::vector<bool> wanted{needs(g, 0), needs(g, 1), needs(g, 2)};
  if (wanted[0] || wanted[1] || wanted[2]) {
    set_grads(
        g,
        g.GraphBuilder::node(
            kOrtrainDomain, "BatchNormGrad",
            {g.output_grad(0), g.input(0), g.has_input(1) ? g.input(1) : kNoValue, g.output(3),
             g.output(4), g.output_grad(1), g.output_grad(2), g.output_grad(3), g.output_grad(4)},
            {{"momentum", momentum}}, wanted),
        3);
  }
  for (size_t i = 3; i < 5; ++i) {
    if (needs(g, i) && g.has_output_grad(i - 2)) {
      g.set_input_grad(i, g.mul(g.output_grad(i - 2), 1.0 - momentum));
    }
  }
}

// training_mode 1: the statistics are made again, with the population variance in the update.
void training_mode_gradient(GradContext& g) {
  const double momentum = g.attrs().float_("momentum");
  const Attributes epsilon{{"epsilon", g.attrs().float_("epsilon")}};
  const ValueId x = g.input(0);
  const std::vector<bool> wanted{needs(g, 0), needs(g, 1), needs(g, 2)};
  if (wanted[0] || wanted[1] || wanted[2]) {
    const std::vector<ValueId> made = g.GraphBuilder::node(
        kOrtrainDomain, "BatchNormTraining", {x}, epsilon, {false, false, false, true, true});
    const ValueId mean = made[3], invstd = made[4];
    ValueId mean_grad = kNoValue, invstd_grad = kNoValue;
    if (g.has_output_grad(1)) {
      mean_grad = g.mul(g.cast(g.output_grad(1), g.dtype(mean)), 1.0 - momentum);
    }
    if (g.has_output_grad(2)) {  // var = invstd^-2 - epsilon
      const ValueId cube = g.mul(g.mul(invstd, invstd), invstd);
      invstd_grad =
          g.div(g.mul(g.cast(g.output_grad(2), g.dtype(mean)), -2.0 * (1.0 - momentum)), cube);
    }
    set_grads(g,
              g.GraphBuilder::node(kOrtrainDomain, "BatchNormGrad",
                                   {g.output_grad(0), x, g.input(1), mean, invstd, kNoValue,
                                    kNoValue, mean_grad, invstd_grad},
                                   {{"momentum", momentum}}, wanted),
              3);
  }
  for (size_t i = 3; i < 5; ++i) {
    if (needs(g, i) && g.has_output_grad(i - 2)) {
      g.set_input_grad(i, g.mul(g.output_grad(i - 2), momentum));
    }
  }
}

void batch_normalization_gradient(GradContext& g) {
  if (g.attrs().int_("training_mode") != 0) return training_mode_gradient(g);
  std::vector<bool> wanted;
  for (size_t i = 0; i < 5; ++i) wanted.push_back(needs(g, i));
  set_grads(g,
            g.GraphBuilder::node(kOrtrainDomain, "BatchNormInferenceGrad",
                                 {g.output_grad(0), g.input(0), g.input(1), g.input(3), g.input(4)},
                                 {{"epsilon", g.attrs().float_("epsilon")}}, wanted),
            5);
}

void instance_gradient(GradContext& g) {
  set_grads(g,
            g.GraphBuilder::node(kOrtrainDomain, "InstanceNormGrad",
                                 {g.output_grad(0), g.input(0), g.input(1)},
                                 {{"epsilon", g.attrs().float_("epsilon")}},
                                 {needs(g, 0), needs(g, 1), needs(g, 2)}),
            3);
}

// With the statistics of the batch, as layers without running ones have it.
std::vector<ValueId> training_form(ExpandContext& e) {
  for (size_t i = 1; i < 5; ++i) {
    if (e.wants_output(i)) {
      throw UnsupportedError("what it tells about the batch has no form in standard operators");
    }
  }
  // 16-bit values in float, as the kernel.
  const DType type = e.dtype(e.input(0)), wide = type == DType::f64 ? DType::f64 : DType::f32;
  const ValueId x = e.cast(e.input(0), wide);
  std::vector<int64_t> axes{0}, behind;
  for (int64_t axis = 2; axis < e.rank(x); ++axis) {
    axes.push_back(axis);
    behind.push_back(axis - 1);
  }
  const auto of_channel = [&](size_t i) {
    const ValueId value = e.cast(e.input(i), wide);
    return behind.empty() ? value : e.unsqueeze(value, behind);
  };
  const ValueId centered = e.sub(x, e.reduce("ReduceMean", x, axes, true));
  const ValueId variance = e.reduce("ReduceMean", e.mul(centered, centered), axes, true);
  const ValueId deviation = e.unary("Sqrt", e.add(variance, e.attrs().float_("epsilon")));
  ValueId y = e.div(centered, deviation);
  if (e.has_input(1)) y = e.mul(y, of_channel(1));
  if (e.has_input(2)) y = e.add(y, of_channel(2));
  return {e.cast(y, type), kNoValue, kNoValue, kNoValue, kNoValue};
}

void register_training(OpRegistry& registry) {
  const std::string own(kOrtrainDomain);
  registry.add(
      {.name = "BatchNormTraining",
       .domain = own,
       .summary = "y = (x - mean) * invstd * scale + bias with the batch's mean and biased "
                  "variance per channel; new = (1 - momentum) * running + momentum * batch, "
                  "the variance unbiased there.",
       .inputs = {{"x", "T"},
                  {"scale", "U", Arity::optional},
                  {"bias", "U", Arity::optional},
                  {"running_mean", "R", Arity::optional},
                  {"running_var", "R", Arity::optional}},
       .outputs = {{"y", "T", Arity::optional},
                   {"new_running_mean", "R", Arity::optional},
                   {"new_running_var", "R", Arity::optional},
                   {"save_mean", "S", Arity::optional},
                   {"save_invstd", "S", Arity::optional}},
       .attrs = {{"epsilon", 1e-5}, {"momentum", 0.1}},
       .types =
           {{"T", kFloatTypes}, {"U", kFloatTypes}, {"R", kFloatTypes}, {"S", kFullFloatTypes}},
       .precision = Precision::deny,
       .infer = infer_training,
       .gradient = training_gradient,
       .standard_form = training_form});
  registry.add({.name = "BatchNormGrad",
                .domain = own,
                .summary = "Gradients of BatchNormTraining from those of any of its outputs.",
                .inputs = {{"dy", "T", Arity::optional},
                           {"x", "T"},
                           {"scale", "U", Arity::optional},
                           {"save_mean", "S"},
                           {"save_invstd", "S"},
                           {"d_new_running_mean", "R", Arity::optional},
                           {"d_new_running_var", "R", Arity::optional},
                           {"d_save_mean", "S", Arity::optional},
                           {"d_save_invstd", "S", Arity::optional}},
                .outputs = {{"dx", "T", Arity::optional},
                            {"dscale", "U", Arity::optional},
                            {"dbias", "U", Arity::optional}},
                .attrs = {{"momentum", 0.1}},
                .types = {{"T", kFloatTypes},
                          {"U", kFloatTypes},
                          {"R", kFloatTypes},
                          {"S", kFullFloatTypes}},
                .infer = infer_grad,
                .gradient = nullptr});
}

void register_inference(OpRegistry& registry) {
  registry.add(
      {.name = "BatchNormalization",
       .domain = "",
       .since = 14,
       .summary = "y = (X - mean) / sqrt(var + epsilon) * scale + B, with given or, in "
                  "training mode, the batch's statistics.",
       .inputs =
           {{"X", "T"}, {"scale", "T1"}, {"B", "T1"}, {"input_mean", "T2"}, {"input_var", "T2"}},
       .outputs = {{"Y", "T"},
                   {"running_mean", "T2", Arity::optional},
                   {"running_var", "T2", Arity::optional}},
       .attrs = {{"epsilon", 1e-5}, {"momentum", 0.9}, {"training_mode", int64_t{0}}},
       .types = {{"T", kFloatTypes}, {"T1", kFloatTypes}, {"T2", kFloatTypes}},
       .precision = Precision::deny,
       .infer = infer_batch_normalization,
       .gradient = batch_normalization_gradient});
  registry.add({.name = "BatchNormInferenceGrad",
                .domain = std::string(kOrtrainDomain),
                .summary = "Gradients of y = (x - mean) / sqrt(var + epsilon) * scale + bias.",
                .inputs = {{"dy", "T"}, {"x", "T"}, {"scale", "T1"}, {"mean", "T2"}, {"var", "T2"}},
                .outputs = {{"dx", "T", Arity::optional},
                            {"dscale", "T1", Arity::optional},
                            {"dbias", "T1", Arity::optional},
                            {"dmean", "T2", Arity::optional},
                            {"dvar", "T2", Arity::optional}},
                .attrs = {{"epsilon", 1e-5}},
                .types = {{"T", kFloatTypes}, {"T1", kFloatTypes}, {"T2", kFloatTypes}},
                .infer = infer_inference_grad,
                .gradient = nullptr});
}

void register_instance(OpRegistry& registry) {
  registry.add({.name = "InstanceNormalization",
                .domain = "",
                .since = 6,
                .summary =
                    "y = (x - mean) / sqrt(var + epsilon) * scale + B, with the statistics of "
                    "each image and channel.",
                .inputs = {{"input", "T"}, {"scale", "T"}, {"B", "T"}},
                .outputs = {{"output", "T"}},
                .attrs = {{"epsilon", 1e-5}},
                .types = {{"T", kFloatTypes}},
                .precision = Precision::deny,
                .infer = infer_instance,
                .gradient = instance_gradient});
  registry.add({.name = "InstanceNormGrad",
                .domain = std::string(kOrtrainDomain),
                .summary = "Gradients of InstanceNormalization; the statistics are made again.",
                .inputs = {{"dy", "T"}, {"x", "T"}, {"scale", "T"}},
                .outputs = {{"dx", "T", Arity::optional},
                            {"dscale", "T", Arity::optional},
                            {"dbias", "T", Arity::optional}},
                .attrs = {{"epsilon", 1e-5}},
                .types = {{"T", kFloatTypes}},
                .infer = infer_instance_grad,
                .gradient = nullptr});
}

}  // namespace

void register_batch_norm(OpRegistry& registry) {
  register_training(registry);
  register_inference(registry);
  register_instance(registry);
}

}  // namespace ortrain::ops
