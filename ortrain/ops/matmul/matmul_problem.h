// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/base/dim.h"

namespace ortrain::ops {

// A broadcast matrix product as `count` plain ones: for the offsets a, b, y of product i
// (offsets_of)
//   Y[y] [m, n] = op(A[a]) [m, k] * op(B[b]) [k, n].
// Where B is one matrix, the rows of all matrices of A are taken together.
struct MatMulProblem {
  bool trans_a = false;
  bool trans_b = false;
  int64_t m = 0, n = 0, k = 0;
  int64_t lda = 0, ldb = 0;
  int64_t count = 1;

  struct Offsets {
    int64_t a = 0, b = 0, y = 0;
  };
  // Computed: a list of them could be longer than the operands.
  Offsets offsets_of(int64_t product) const;

  // Shapes as numpy.matmul reads them: one-dimensional operands are a row (a) or a column (b).
  // Transposes need two dimensions.
  MatMulProblem(const Dims& a, const Dims& b, bool trans_a, bool trans_b);

 private:
  Dims batch_, a_strides_, b_strides_;
};

// The shape of the product, the inner extents compared where both are known; throws ShapeError.
Shape matmul_shape(const Shape& a, const Shape& b, bool trans_a, bool trans_b);

// Throws ShapeError naming `what` unless the extents are equal or cannot be compared yet.
void check_same_extent(const Dim& a, const Dim& b, const char* what, const Shape& left,
                       const Shape& right);

}  // namespace ortrain::ops
