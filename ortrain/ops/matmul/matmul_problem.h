// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/base/dim.h"

namespace ortrain::ops {

// A broadcast matrix product as a list of plain ones:
//   Y[y_offsets[i]] [m, n] = op(A[a_offsets[i]]) [m, k] * op(B[b_offsets[i]]) [k, n].
// Where B is one matrix, the rows of all matrices of A are taken together.
struct MatMulProblem {
  bool trans_a = false;
  bool trans_b = false;
  int64_t m = 0, n = 0, k = 0;
  int64_t lda = 0, ldb = 0;
  Dims a_offsets, b_offsets, y_offsets;

  // Shapes as numpy.matmul reads them: one-dimensional operands are a row (a) or a column (b).
  // Transposes need two dimensions.
  MatMulProblem(const Dims& a, const Dims& b, bool trans_a, bool trans_b);
};

// The shape of the product, the inner extents compared where both are known; throws ShapeError.
Shape matmul_shape(const Shape& a, const Shape& b, bool trans_a, bool trans_b);

// Throws ShapeError naming `what` unless the extents are equal or cannot be compared yet.
void check_same_extent(const Dim& a, const Dim& b, const char* what, const Shape& left,
                       const Shape& right);

}  // namespace ortrain::ops
