// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "ortrain/ir/node_spec.h"

namespace ortrain {

// Elements of a tensor as a floating-point number.
double count_of(const TensorSpec& spec);

// Extent `from_end` places from the end, 1 = the last one; 1 beyond the rank.
double extent_from_end(const TensorSpec& spec, size_t from_end);

// Of y = op(a) b: 2 elements(y) times the last extent of a, or the last but one where the integer
// attribute `transposed` is set.
double product_flops(const NodeSpec& spec, const std::string& transposed = "");

// Of dw = dy^T x, x being input 1: 2 elements(dy) times the last extent of x.
double weight_grad_flops(const NodeSpec& spec);

}  // namespace ortrain
