// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ortrain::cpu {

// Operations on one contiguous row of n elements, for the best SIMD target of this machine.
// Outputs may be the same row as an input. T is float or double, also for sums.
template <class T>
struct RowOps {
  T (*sum)(const T* x, int64_t n);
  T (*max)(const T* x, int64_t n);  // -inf for n = 0
  T (*dot)(const T* x, const T* y, int64_t n);
  void (*add)(const T* x, T* y, int64_t n);            // y += x
  void (*axpy)(T alpha, const T* x, T* y, int64_t n);  // y += alpha * x
  void (*scale)(T alpha, T* x, int64_t n);             // x *= alpha
  void (*multiply)(const T* x, T* y, int64_t n);       // y *= x
  T (*exp_shifted)(T shift, const T* x, T* y, int64_t n);  // y = exp(x - shift); returns its sum
  T (*sum_exp_shifted)(T shift, const T* x, int64_t n);    // sum of exp(x - shift)

  void (*softmax)(const T* x, T* y, int64_t n);
  void (*log_softmax)(const T* x, T* y, int64_t n);
  // dx = y (dy - <dy, y>)
  void (*softmax_grad)(const T* dy, const T* y, T* dx, int64_t n);
  // dx = dy - exp(y) sum(dy)
  void (*log_softmax_grad)(const T* dy, const T* y, T* dx, int64_t n);
  // dx = alpha exp(x - shift) + offset: gradient of log-sum-exp losses
  void (*exp_affine)(T alpha, T shift, T offset, const T* x, T* dx, int64_t n);

  // y = (x - mean) inv_std scale + bias, inv_std = 1 / sqrt(var + epsilon); scale, bias may be null.
  void (*layer_norm)(const T* x, const T* scale, const T* bias, T epsilon, T* y, T* mean,
                     T* inv_std, int64_t n);
  // g = dy scale, h = (x - mean) inv_std: dx = inv_std (g - mean(g) - h mean(g h));
  // dscale += dy h, dbias += dy. scale, dx, dscale, dbias may be null.
  void (*layer_norm_grad)(const T* dy, const T* x, const T* scale, T mean, T inv_std, T* dx,
                          T* dscale, T* dbias, int64_t n);
  // y = x inv_rms scale, inv_rms = 1 / sqrt(mean(x^2) + epsilon); scale may be null.
  void (*rms_norm)(const T* x, const T* scale, T epsilon, T* y, T* inv_rms, int64_t n);
  // g = dy scale, h = x inv_rms: dx = inv_rms (g - h mean(g h)); dscale += dy h.
  void (*rms_norm_grad)(const T* dy, const T* x, const T* scale, T inv_rms, T* dx, T* dscale,
                        int64_t n);
};

RowOps<float> row_ops_f32();
RowOps<double> row_ops_f64();

template <class T>
RowOps<T> row_ops();
template <>
inline RowOps<float> row_ops<float>() {
  return row_ops_f32();
}
template <>
inline RowOps<double> row_ops<double>() {
  return row_ops_f64();
}

}  // namespace ortrain::cpu
