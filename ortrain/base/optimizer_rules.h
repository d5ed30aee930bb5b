// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

#include "ortrain/base/device_code.h"

// The formulas of the optimizers, as numbers that one step multiplies with. Host and devices read
// the same ones.
namespace ortrain {

// One step of Adam on one tensor. With g the gradient times `gradient_factor`, plus l2 * p:
//   m = beta1 m + (1 - beta1) g      v = beta2 v + (1 - beta2) g^2      x = max(x, v) (AMSGrad)
//   p = keep_after (keep_before p - step_size m / (sqrt(x or v) root_scale + epsilon))
// PyTorch's AdamW: step_size = lr / (1 - beta1^t), root_scale = 1 / sqrt(1 - beta2^t),
// keep_before = 1 - lr weight_decay. Hugging Face's former AdamW and ONNX's Adam put the bias
// correction into step_size (root_scale 1) and the decay into keep_after.
struct AdamCoefficients {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double step_size = 0;
  double root_scale = 1;
  double keep_before = 1;
  double keep_after = 1;
  double l2 = 0;
  double gradient_factor = 1;
};

// One step of SGD. With g as above:
//   b = buffer_keep b + buffer_gain g      p = p - lr (nesterov ? g + momentum b : b)
// and without a buffer p = p - lr g. PyTorch's first step has buffer_keep 0 and buffer_gain 1.
struct SgdCoefficients {
  double lr = 0;
  double momentum = 0;
  double buffer_keep = 0;
  double buffer_gain = 1;
  double l2 = 0;
  double gradient_factor = 1;
  bool nesterov = false;
};

// One step of Adagrad (Duchi et al. 2011). With g as above:
//   h = h + g^2      p = p - lr g / (sqrt(h) + epsilon)
struct AdagradCoefficients {
  double lr = 0;
  double epsilon = 1e-10;
  double l2 = 0;
  double gradient_factor = 1;
};

// One step of LAMB (You et al. 2020, algorithm 2). m and v as for Adam, then
//   u = m mean_scale / (sqrt(v) root_scale + epsilon) + weight_decay p
//   p = p - lr clamp(|p| / |u|, ratio_min, ratio_max) u
// with the norms over the whole tensor, and 1 for the ratio where a norm is zero. Both scales are 1
// without bias correction. 16-bit moments are rounded before p is made from them.
struct LambCoefficients {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-6;
  double lr = 0;
  double mean_scale = 1;
  double root_scale = 1;
  double weight_decay = 0;
  double ratio_min = 0;
  double ratio_max = 0;
  double gradient_factor = 1;
};

// Squares of the norms of a parameter and of its update.
struct LambNorms {
  double param = 0;
  double update = 0;
};

// How Adam decays weights; the numbers are those of FusedAdam's adam_w_mode.
enum class DecayMode {
  l2 = 0,         // torch.optim.Adam: part of the gradient
  after = 1,      // the former AdamW of Hugging Face: of the updated weight
  decoupled = 2,  // torch.optim.AdamW: of the weight before the update
};

// What a rule says about a tensor, without the rate's schedule; each rule reads its own.
struct StepRule {
  double lr = 0, beta1 = 0, beta2 = 0, epsilon = 0, weight_decay = 0;
  double momentum = 0, dampening = 0;
  double ratio_min = 0, ratio_max = 0;
  double rate_decay = 0;
  bool nesterov = false, bias_correction = true;
  DecayMode decay_mode = DecayMode::decoupled;
};

// The coefficients of the step with number `step` >= 1, for gradients that are taken as they are.
ORTRAIN_HOST_DEVICE inline AdamCoefficients adam_coefficients(const StepRule& rule, double step) {
  const double bias1 = rule.bias_correction ? 1 - pow(rule.beta1, step) : 1;
  const double root2 = rule.bias_correction ? sqrt(1 - pow(rule.beta2, step)) : 1;
  AdamCoefficients c{.beta1 = rule.beta1,
                     .beta2 = rule.beta2,
                     .epsilon = rule.epsilon,
                     .step_size = rule.lr / bias1};
  if (rule.decay_mode == DecayMode::after) {
    c.step_size *= root2;
    c.keep_after = 1 - rule.lr * rule.weight_decay;
  } else {
    c.root_scale = 1 / root2;
    if (rule.decay_mode == DecayMode::l2) c.l2 = rule.weight_decay;
    if (rule.decay_mode == DecayMode::decoupled) c.keep_before = 1 - rule.lr * rule.weight_decay;
  }
  return c;
}

ORTRAIN_HOST_DEVICE inline LambCoefficients lamb_coefficients(const StepRule& rule, double step) {
  const bool correct = rule.bias_correction;
  return {.beta1 = rule.beta1,
          .beta2 = rule.beta2,
          .epsilon = rule.epsilon,
          .lr = rule.lr,
          .mean_scale = correct ? 1 / (1 - pow(rule.beta1, step)) : 1,
          .root_scale = correct ? 1 / sqrt(1 - pow(rule.beta2, step)) : 1,
          .weight_decay = rule.weight_decay,
          .ratio_min = rule.ratio_min,
          .ratio_max = rule.ratio_max};
}

// `first`: the buffer is made in this step.
ORTRAIN_HOST_DEVICE inline SgdCoefficients sgd_coefficients(const StepRule& rule, bool first) {
  return {.lr = rule.lr,
          .momentum = rule.momentum,
          .buffer_keep = first ? 0 : rule.momentum,
          .buffer_gain = first ? 1 : 1 - rule.dampening,
          .l2 = rule.weight_decay,
          .nesterov = rule.nesterov};
}

ORTRAIN_HOST_DEVICE inline AdagradCoefficients adagrad_coefficients(const StepRule& rule,
                                                                    double step) {
  return {.lr = rule.lr / (1 + (step - 1) * rule.rate_decay),
          .epsilon = rule.epsilon,
          .l2 = rule.weight_decay};
}

// What gradients of norm `norm` are multiplied by so that it is at most `max_norm`; NaN for NaN.
// torch.nn.utils.clip_grad_norm_'s formula: min(1, max_norm / (norm + 1e-6)).
ORTRAIN_HOST_DEVICE inline double clip_factor(double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  return factor > 1 ? 1 : factor;
}

// By how much LAMB scales the rate of a tensor.
ORTRAIN_HOST_DEVICE inline double lamb_ratio(const LambNorms& norms,
                                             const LambCoefficients& coefficients) {
  if (norms.param == 0 || norms.update == 0) return 1;
  const double ratio = sqrt(norms.param) / sqrt(norms.update);
  const double bounded = coefficients.ratio_max < ratio ? coefficients.ratio_max : ratio;
  return bounded < coefficients.ratio_min ? coefficients.ratio_min : bounded;
}

}  // namespace ortrain
