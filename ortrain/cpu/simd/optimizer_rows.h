// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ortrain::cpu {

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

// The kernels below take n elements of each operand, T = float or double, and compute in T. An
// element's result does not depend on n or on its position.

// `max_exp_avg_sq` is null without AMSGrad.
template <class T>
void adam_row(const AdamCoefficients& coefficients, const T* grad, T* param, T* exp_avg,
              T* exp_avg_sq, T* max_exp_avg_sq, int64_t n);

// `buffer` is null without momentum.
template <class T>
void sgd_row(const SgdCoefficients& coefficients, const T* grad, T* param, T* buffer, int64_t n);

// `sum` is h.
template <class T>
void adagrad_row(const AdagradCoefficients& coefficients, const T* grad, T* param, T* sum,
                 int64_t n);

// Updates the moments and writes u.
template <class T>
void lamb_moments_row(const LambCoefficients& coefficients, const T* grad, const T* param,
                      T* exp_avg, T* exp_avg_sq, T* update, int64_t n);

// p = p - rate u, with u made from the moments again.
template <class T>
void lamb_apply_row(const LambCoefficients& coefficients, double rate, const T* exp_avg,
                    const T* exp_avg_sq, T* param, int64_t n);

// The sum of squares, added up in double.
template <class T>
double sum_squares_row(const T* x, int64_t n);

}  // namespace ortrain::cpu
