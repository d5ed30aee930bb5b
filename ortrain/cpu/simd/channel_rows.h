// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ortrain::cpu {

// Rows of one channel of a batch normalisation, for the best SIMD target of this machine. Sums are
// made in double; their order depends on n and the target alone. T is float or double.
template <class T>
struct ChannelRows {
  double (*sum)(const T* x, int64_t n);
  double (*squared_distance)(const T* x, double mean, int64_t n);  // sum of (x - mean)^2
  // *plain += sum of dy, *centred += sum of dy (x - mean).
  void (*gradient_sums)(const T* dy, const T* x, double mean, int64_t n, double* plain,
                        double* centred);
  // y = (x - mean) factor + shift; y may be x.
  void (*affine)(const T* x, T mean, T factor, T shift, T* y, int64_t n);
  // dx = dy factor + (x - mean) slope + shift; dx may be x or dy.
  void (*input_gradient)(const T* dy, const T* x, T mean, T factor, T slope, T shift, T* dx,
                         int64_t n);
};

template <class T>
ChannelRows<T> channel_rows();
template <>
ChannelRows<float> channel_rows<float>();
template <>
ChannelRows<double> channel_rows<double>();

}  // namespace ortrain::cpu
