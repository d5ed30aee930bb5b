// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/base/dim.h"

namespace ortrain {

// A shape seen from one axis: element (o, i, r) lies at (o * size + i) * inner + r.
struct AxisSplit {
  int64_t outer, size, inner;

  AxisSplit(const Dims& dims, int64_t axis) : outer(1), size(1), inner(1) {
    if (dims.empty()) return;  // a scalar is one element along its only axis
    const size_t at = static_cast<size_t>(normalize_axis(axis, dims.size()));
    for (size_t i = 0; i < dims.size(); ++i) (i < at ? outer : i == at ? size : inner) *= dims[i];
  }
};

}  // namespace ortrain
