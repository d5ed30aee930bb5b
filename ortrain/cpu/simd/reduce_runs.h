// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ortrain::cpu {

// sum x, sum |x|, sum x^2, product x, max x, min x. NaN wins a maximum or minimum.
enum class ReduceKind { sum, sum_abs, sum_squares, product, maximum, minimum };

// Reduces n elements in a row; the identity for n = 0. Not for products. The order of additions
// depends on n and the SIMD target alone; lanes are joined in double.
double reduce_run(ReduceKind kind, const float* x, int64_t n);
double reduce_run(ReduceKind kind, const double* x, int64_t n);

// into[c] = into[c] (op) x[r * row_stride + c] for r < rows, c < columns, r ascending. Not for
// products.
void reduce_rows(ReduceKind kind, const float* x, int64_t row_stride, int64_t rows,
                 int64_t columns, float* into);
void reduce_rows(ReduceKind kind, const double* x, int64_t row_stride, int64_t rows,
                 int64_t columns, double* into);

}  // namespace ortrain::cpu
