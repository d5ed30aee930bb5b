// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/training/optimizer_steps.h"

#include <limits>

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

void infer_step(InferContext& context) {
  require_scalar(context, 0, "learning rate");
  require_scalar(context, 1, "step number");
  require_scalar(context, 2, "factor");
  require_scalar(context, 3, "skip flag");
  const StepLayout at(context.num_inputs(), num_states(context.node().op, context.attrs()));
  if (context.num_outputs() != at.count * (1 + at.states)) {
    throw InvalidModelError(str("has ", context.num_outputs(), " outputs, needs ",
                                at.count * (1 + at.states), ", the next of all but gradients"));
  }
  const auto require_like = [&](size_t i, size_t input, const char* what) {
    if (!context.has_input(input)) throw InvalidModelError(str("the ", what, " ", i, " is absent"));
    if (!(context.shape(input) == context.shape(at.parameter(i)))) {
      throw ShapeError(str("the ", what, " ", i, " has shape ", shape_str(context.shape(input)),
                           ", the parameter ", shape_str(context.shape(at.parameter(i)))));
    }
    const bool wide = context.dtype(at.parameter(i)) == DType::f64;
    if (wide != (context.dtype(input) == DType::f64)) {
      throw DTypeError(str("the ", what, " ", i, " is ", name_of(context.dtype(input)),
                           ", the parameter ", name_of(context.dtype(at.parameter(i)))));
    }
  };
  for (size_t i = 0; i < at.count; ++i) {
    if (!context.has_input(at.parameter(i))) {
      throw InvalidModelError(str("parameter ", i, " is absent"));
    }
    require_like(i, at.gradient(i), "gradient");
    const auto keep = [&](size_t input, size_t output) {
      context.set_output(output, context.dtype(input), context.shape(input));
    };
    keep(at.parameter(i), at.new_parameter(i));
    for (size_t kind = 0; kind < at.states; ++kind) {
      require_like(i, at.state(kind, i), "state");
      keep(at.state(kind, i), at.new_state(kind, i));
    }
  }
}

void infer_norm(InferContext& context) { context.set_output(0, DType::f64, {}); }

void infer_clip_factor(InferContext& context) {
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
  clip.outputs = {{"factor", "float64"}, {"unscaled_norm", "float64"}, {"finite", "bool"}};
  clip.attrs = {{"max_norm", 0.0}};
  clip.infer = infer_clip_factor;
  clip.differentiable = false;
  registry.add(std::move(clip));
}

}  // namespace ortrain::ops
