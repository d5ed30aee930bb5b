// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/ir/infer_context.h"

namespace ortrain::ops {

// float64 for float64, float32 for every other float type: statistics of normalized rows.
DType statistics_type(DType type);

// The axis attribute as an index into the input's shape; throws ShapeError.
size_t normalized_axis(const AttributeReader& attrs, const Shape& x);

// Checks that `parameter` has the shape of x[axis:], leading extents of 1 allowed.
void check_normalized_shape(const Shape& parameter, const Shape& x, size_t axis, const char* name);

}  // namespace ortrain::ops
