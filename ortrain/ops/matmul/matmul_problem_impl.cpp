// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ops/matmul/matmul_problem.h"

namespace ortrain::ops {
namespace {

Dims batch_of(const Dims& dims) { return Dims(dims.begin(), dims.end() - 2); }

// Steps from matrix to matrix of `dims` (size elements each) along the axes of `batch`.
Dims strides_in(const Dims& dims, const Dims& batch, int64_t size) {
  const Dims own = batch_of(dims);
  Dims strides(batch.size(), 0);
  int64_t stride = size;
  for (size_t i = own.size(); i-- > 0;) {
    const size_t axis = batch.size() - own.size() + i;
    strides[axis] = own[i] == 1 ? 0 : stride;
    stride *= own[i];
  }
  return strides;
}

}  // namespace

MatMulProblem::MatMulProblem(const Dims& a_dims, const Dims& b_dims, bool trans_a, bool trans_b)
    : trans_a(trans_a), trans_b(trans_b) {
  Dims a = a_dims;
  Dims b = b_dims;
  if (a.size() == 1) a.insert(a.begin(), 1);
  if (b.size() == 1) b.push_back(1);
  check(a.size() >= 2 && b.size() >= 2, "a matrix product of scalars");
  lda = a.back();
  ldb = b.back();
  m = trans_a ? a[a.size() - 1] : a[a.size() - 2];
  k = trans_a ? a[a.size() - 2] : a[a.size() - 1];
  n = trans_b ? b[b.size() - 2] : b[b.size() - 1];

  const Dims batch = broadcast(batch_of(a), batch_of(b));
  const bool one_b = num_elements(batch_of(b)) == 1;
  if (one_b && !trans_a && num_elements(batch_of(a)) == num_elements(batch)) {
    m *= num_elements(batch);
    return;
  }
  count = num_elements(batch);
  batch_ = batch;
  a_strides_ = strides_in(a, batch, m * k);
  b_strides_ = strides_in(b, batch, k * n);
}

MatMulProblem::Offsets MatMulProblem::offsets_of(int64_t product) const {
  Offsets offsets{.y = product * m * n};
  for (size_t axis = batch_.size(); axis-- > 0;) {
    const int64_t index = product % batch_[axis];
    product /= batch_[axis];
    offsets.a += index * a_strides_[axis];
    offsets.b += index * b_strides_[axis];
  }
  return offsets;
}

void check_same_extent(const Dim& a, const Dim& b, const char* what, const Shape& left,
                       const Shape& right) {
  if (a == b || !a.is_constant() || !b.is_constant()) return;
  throw ShapeError(str(what, " differ: ", a.str(), " and ", b.str(), " of shapes ", shape_str(left),
                       " and ", shape_str(right)));
}

Shape matmul_shape(const Shape& a, const Shape& b, bool trans_a, bool trans_b) {
  if (a.empty() || b.empty()) {
    throw ShapeError(
        str("a scalar has no matrix product: shapes ", shape_str(a), " and ", shape_str(b)));
  }
  Shape left = a;
  Shape right = b;
  if (left.size() == 1) left.insert(left.begin(), Dim(1));
  if (right.size() == 1) right.push_back(Dim(1));
  const size_t ra = left.size();
  const size_t rb = right.size();
  check_same_extent(trans_a ? left[ra - 2] : left[ra - 1], trans_b ? right[rb - 1] : right[rb - 2],
                    "inner extents", a, b);
  Shape result =
      broadcast(Shape(left.begin(), left.end() - 2), Shape(right.begin(), right.end() - 2));
  if (a.size() > 1) result.push_back(trans_a ? left[ra - 1] : left[ra - 2]);
  if (b.size() > 1) result.push_back(trans_b ? right[rb - 2] : right[rb - 1]);
  return result;
}

}  // namespace ortrain::ops
