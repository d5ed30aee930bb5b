// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ortrain::cpu {

// y[i] = f(x[i]) for i < n; y may be x. Accuracy: a few ulp (math-inl.h).
void vector_exp(const float* x, float* y, int64_t n);
void vector_exp(const double* x, double* y, int64_t n);
void vector_expm1(const float* x, float* y, int64_t n);
void vector_expm1(const double* x, double* y, int64_t n);
void vector_log(const float* x, float* y, int64_t n);
void vector_log(const double* x, double* y, int64_t n);
void vector_log1p(const float* x, float* y, int64_t n);
void vector_log1p(const double* x, double* y, int64_t n);
void vector_tanh(const float* x, float* y, int64_t n);
void vector_tanh(const double* x, double* y, int64_t n);
void vector_sigmoid(const float* x, float* y, int64_t n);
void vector_sigmoid(const double* x, double* y, int64_t n);
void vector_erf(const float* x, float* y, int64_t n);
void vector_erf(const double* x, double* y, int64_t n);

}  // namespace ortrain::cpu
