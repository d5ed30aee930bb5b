// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/training/optimizer_steps.h"

#include <algorithm>
#include <limits>
#include <variant>

#include "ortrain/base/optimizer_numbers.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::ops {
namespace {

void require_scalar(const InferContext& context, size_t i, const char* what) {
  if (context.has_input(i) && context.rank(i) != 0) {
    throw ShapeError(
        str("the ", what, " has shape ", shape_str(context.shape(i)), ", expected a scalar"));
  }
}

// A number that is none, or of the wrong sign, makes all weights NaN in a step.
void require_numbers(const InferContext& context) {
  for (const auto& [name, attribute] : context.node().attributes) {
    const double* number = std::get_if<double>(&attribute);
    const std::string reason = number == nullptr ? "" : out_of_range(name, *number);
    if (!reason.empty()) throw InvalidModelError(reason);
  }
}

// Shapes that may turn out equal once symbols have numbers; then this is asked again.
bool may_be_equal(const Shape& a, const Shape& b) {
  return std::ranges::equal(a, b, [](const Dim& x, const Dim& y) {
    return x == y || !x.is_constant() || !y.is_constant();
  });
}

// A gradient or state must have the shape of its parameter, and be wide where that is.
void require_alike(const InferContext& context, size_t parameter, size_t input, const char* what,
                   size_t i) {
  if (!context.has_input(parameter)) throw InvalidModelError(str("parameter ", i, " is absent"));
  if (!context.has_input(input)) throw InvalidModelError(str("the ", what, " ", i, " is absent"));
  if (!may_be_equal(context.shape(input), context.shape(parameter))) {
    throw ShapeError(str("the ", what, " ", i, " has shape ", shape_str(context.shape(input)),
                         ", the parameter ", shape_str(context.shape(parameter))));
  }
  const bool wide = context.dtype(parameter) == DType::f64;
  if (wide != (context.dtype(input) == DType::f64)) {
    throw DTypeError(str("the ", what, " ", i, " is ", name_of(context.dtype(input)),
                         ", the parameter ", name_of(context.dtype(parameter))));
  }
}

void infer_step(InferContext& context) {
  require_numbers(context);
  require_scalar(context, 0, "learning rate");
  require_scalar(context, 1, "step number");
  require_scalar(context, 2, "factor");
  require_scalar(context, 3, "skip flag");
  const StepLayout at(context.num_inputs(), num_states(context.node().op, context.attrs()));
  if (context.num_outputs() != at.count * (1 + at.states)) {
    throw InvalidModelError(str("has ", context.num_outputs(), " outputs, needs ",
                                at.count * (1 + at.states), ", the next of all but gradients"));
  }
  for (size_t i = 0; i < at.count; ++i) {
    require_alike(context, at.parameter(i), at.gradient(i), "gradient", i);
    const auto keep = [&](size_t input, size_t output) {
      context.set_output(output, context.dtype(input), context.shape(input));
    };
    keep(at.parameter(i), at.new_parameter(i));
    for (size_t kind = 0; kind < at.states; ++kind) {
      require_alike(context, at.parameter(i), at.state(kind, i), "state", i);
      keep(at.state(kind, i), at.new_state(kind, i));
    }
  }
}

// Shapes [tensors, 2].
Shape norms_shape(const StepLayout& at) { return {Dim(static_cast<int64_t>(at.count)), Dim(2)}; }

void infer_lamb_moments(InferContext& context) {
  require_numbers(context);
  require_scalar(context, 0, "learning rate");
  require_scalar(context, 1, "step number");
  require_scalar(context, 2, "factor");
  require_scalar(context, 3, "skip flag");
  const StepLayout at(context.num_inputs(), 2);
  if (context.num_outputs() != 1 + 2 * at.count) {
    throw InvalidModelError(str("has ", context.num_outputs(), " outputs, needs ", 1 + 2 * at.count,
                                ", the norms and the next states"));
  }
  context.set_output(0, DType::f64, norms_shape(at));
  for (size_t i = 0; i < at.count; ++i) {
    require_alike(context, at.parameter(i), at.gradient(i), "gradient", i);
    for (size_t kind = 0; kind < 2; ++kind) {
      const size_t input = at.state(kind, i);
      require_alike(context, at.parameter(i), input, "state", i);
      context.set_output(1 + kind * at.count + i, context.dtype(input), context.shape(input));
    }
  }
}

void infer_lamb_update(InferContext& context) {
  require_numbers(context);
  require_scalar(context, 0, "learning rate");
  require_scalar(context, 1, "step number");
  require_scalar(context, 3, "skip flag");
  const StepLayout at(context.num_inputs(), 1);  // the first state stands where gradients do
  if (context.num_outputs() != at.count) {
    throw InvalidModelError(
        str("has ", context.num_outputs(), " outputs, needs ", at.count, ", the next parameters"));
  }
  if (!(context.shape(2) == norms_shape(at))) {
    throw ShapeError(str("the norms have shape ", shape_str(context.shape(2)), ", expected ",
                         shape_str(norms_shape(at))));
  }
  for (size_t i = 0; i < at.count; ++i) {
    require_alike(context, at.parameter(i), at.gradient(i), "state", i);
    require_alike(context, at.parameter(i), at.state(0, i), "state", i);
    context.set_output(i, context.dtype(at.parameter(i)), context.shape(at.parameter(i)));
  }
}

void infer_norm(InferContext& context) { context.set_output(0, DType::f64, {}); }

void infer_clip_factor(InferContext& context) {
  require_numbers(context);
  require_scalar(context, 0, "norm");
  require_scalar(context, 1, "scale");
  context.set_output(0, DType::f64, {});
  context.set_output(1, DType::f64, {});
  context.set_output(2, DType::boolean, {});
}

OpDef step(std::string name, std::string summary, std::vector<FormalAttribute> attributes) {
  OpDef def;
  def.name = std::move(name);
  def.domain = kOrtrainDomain;
  def.summary = std::move(summary);
  def.inputs = {{"rate", "float64"},
                {"step", "int64"},
                {"factor", "float64", Arity::optional},
                {"skip", "bool", Arity::optional},
                {"tensors", "T*", Arity::variadic}};
  def.outputs = {{"results", "T*", Arity::variadic}};
  def.attrs = std::move(attributes);
  def.types = {{"T*", kFloatTypes}};
  def.infer = infer_step;
  def.differentiable = false;
  return def;
}

}  // namespace

void register_optimizer_steps(OpRegistry& registry);
void register_optimizer_steps(OpRegistry& registry) {
  const std::string tensors =
      " `tensors` are all parameters p, all gradients, and all of each state; `results` the next "
      "parameters and states. g is the gradient times `factor`; with `skip` nothing changes.";
  registry.add(step(
      "SgdStep",
      "One step of gradient descent as torch.optim.SGD: g += weight_decay p; with "
      "momentum b = momentum b + (1 - dampening) g (in step 1 b = g), and g = b or, "
      "with nesterov, g + momentum b; p -= rate g." +
          tensors,
      {{"momentum", 0.0}, {"dampening", 0.0}, {"weight_decay", 0.0}, {"nesterov", int64_t{0}}}));
  registry.add(step("AdamStep",
                    "One step of Adam: m += (1 - beta1) (g - m), v = beta2 v + (1 - beta2) g^2, c1 "
                    "= 1 - beta1^step, c2 = 1 - beta2^step (both 1 without bias_correction). By "
                    "decay_mode, 'decoupled' (AdamW of PyTorch): p = (1 - rate weight_decay) p - "
                    "rate / c1 m / (sqrt(v / c2) + epsilon); 'after' (AdamW of Hugging Face): p = "
                    "(1 - rate weight_decay) (p - rate sqrt(c2) / c1 m / (sqrt(v) + epsilon)); "
                    "'l2': as decoupled without decay, after g += weight_decay p." +
                        tensors,
                    {{"beta1", 0.9},
                     {"beta2", 0.999},
                     {"epsilon", 1e-8},
                     {"weight_decay", 0.0},
                     {"decay_mode", std::string("decoupled")},
                     {"bias_correction", int64_t{1}}}));
  registry.add(
      step("LambStep",
           "One step of LAMB (You et al. 2020, algorithm 2): m and v as in AdamStep, u = "
           "m / c1 / (sqrt(v / c2) + epsilon) + weight_decay p, p -= rate clamp(|p| / |u|, "
           "ratio_min, ratio_max) u, with norms of the tensor and 1 for the ratio where "
           "one is zero." +
               tensors,
           {{"beta1", 0.9},
            {"beta2", 0.999},
            {"epsilon", 1e-6},
            {"weight_decay", 0.0},
            {"ratio_min", -std::numeric_limits<double>::infinity()},
            {"ratio_max", std::numeric_limits<double>::infinity()},
            {"bias_correction", int64_t{1}}}));
  registry.add(step("AdagradStep",
                    "One step of Adagrad as torch.optim.Adagrad: g += weight_decay p, h += g^2, p "
                    "-= rate / (1 + (step - 1) rate_decay) g / (sqrt(h) + epsilon)." +
                        tensors,
                    {{"epsilon", 1e-10}, {"weight_decay", 0.0}, {"rate_decay", 0.0}}));

  const std::vector<FormalAttribute> lamb = {{"beta1", 0.9},
                                             {"beta2", 0.999},
                                             {"epsilon", 1e-6},
                                             {"weight_decay", 0.0},
                                             {"bias_correction", int64_t{1}}};
  OpDef moments = step(
      "LambMoments",
      "The first part of LambStep, for tensors that are slices of whole ones: the next m and v, "
      "and of each slice |p|^2 and |u|^2, which add up to those of the whole; zeros with `skip`." +
          tensors,
      lamb);
  moments.outputs = {{"norms", "float64"}, {"states", "T*", Arity::variadic}};
  moments.infer = infer_lamb_moments;
  registry.add(std::move(moments));
  OpDef update = step("LambUpdate",
                      "The second part of LambStep: the next p of slices, by `norms`, |p|^2 and "
                      "|u|^2 of the whole tensors, [slices, 2]. `tensors` are all parameters, and "
                      "all m and v that LambMoments made; with `skip` nothing changes.",
                      lamb);
  update.inputs[2] = {"norms", "float64"};
  update.attrs.push_back({"ratio_min", -std::numeric_limits<double>::infinity()});
  update.attrs.push_back({"ratio_max", std::numeric_limits<double>::infinity()});
  update.infer = infer_lamb_update;
  registry.add(std::move(update));

  OpDef norm;
  norm.name = "GradientNorm";
  norm.domain = kOrtrainDomain;
  norm.summary = "The 2-norm of all elements of all tensors together, added up in float64.";
  norm.inputs = {{"tensors", "T*", Arity::variadic}};
  norm.outputs = {{"norm", "float64"}};
  norm.types = {{"T*", kFloatTypes}};
  norm.infer = infer_norm;
  norm.differentiable = false;
  registry.add(std::move(norm));

  OpDef clip;
  clip.name = "ClipFactor";
  clip.domain = kOrtrainDomain;
  clip.summary =
      "What gradients of norm `norm`, which carry the factor `scale`, are multiplied by: 1 / "
      "scale, "
      "and min(1, max_norm / (norm / scale + 1e-6)) where max_norm > 0 "
      "(torch.nn.utils.clip_grad_norm_). Also norm / scale, and whether it is finite.";
  clip.inputs = {{"norm", "float64"}, {"scale", "float64", Arity::optional}};
  clip.outputs = {{"factor", "float64", Arity::optional},
                  {"unscaled_norm", "float64", Arity::optional},
                  {"finite", "bool", Arity::optional}};
  clip.attrs = {{"max_norm", 0.0}};
  clip.infer = infer_clip_factor;
  clip.differentiable = false;
  registry.add(std::move(clip));
}

}  // namespace ortrain::ops
