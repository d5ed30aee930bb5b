// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ortrain/base/optimizer_rules.h"

namespace ortrain::cpu {

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
