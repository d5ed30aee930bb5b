// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ortrain/base/dtype.h"
#include "ortrain/ir/expr_program.h"

// SIMD loops over tiles of contiguous elements, one per operation of expression programs. Register
// types are float32, float64, int32, int64 and bool; meanings are those of ir/expr_scalar.h. The
// result may be the memory of an operand of the same element size.
namespace ortrain::cpu {

// y[i] = f(a[i], b[i], c[i]) for i < n. Operands that the operation does not have are ignored.
using TileFn = void (*)(const void* a, const void* b, const void* c, void* y, int64_t n);
// The loop of `op` on operands of `type` (of `select`: the type of the values). Bit k of `single`:
// operand k is one value for all i; never set for all operands. Null when there is none.
TileFn tile_function(ExprOp op, DType type, unsigned single);
TileFn tile_unary(ExprOp op, DType type);
TileFn tile_trigonometric(ExprOp op, DType type);
TileFn tile_binary(ExprOp op, DType type, unsigned single);
TileFn tile_select(DType type, unsigned single);
TileFn tile_cast(DType from, DType to);
// Between the element type of a tensor and its register type; also plain copies.
TileFn tile_load(DType storage);
TileFn tile_store(DType storage);

// y[r] = reduction of x[r * columns ...]; sums are kept in lanes, in an order that depends on
// `columns` alone.
using RowFn = void (*)(const void* x, void* y, int64_t rows, int64_t columns);
RowFn tile_reduction(ExprOp op, DType type);
// y[r * columns + c] = x[r].
RowFn tile_spread(DType type);

// Element i of the tile is element first + i of the stream (base/philox.h).
struct DropoutDraw {
  uint64_t seed;
  uint64_t stream;
  uint64_t first;
  double ratio;
};
void tile_dropout(const float* x, float* y, int64_t n, const DropoutDraw& draw);
void tile_dropout(const double* x, double* y, int64_t n, const DropoutDraw& draw);
void tile_dropout_mask(bool* y, int64_t n, const DropoutDraw& draw);

}  // namespace ortrain::cpu
