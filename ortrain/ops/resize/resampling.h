// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "ortrain/ir/node_spec.h"
#include "ortrain/ops/resize/resize_axes.h"

namespace ortrain::ops {

// One axis after the other, each as sums over [outer, extent, inner].
struct Pass {
  ResizeAxis axis;
  int64_t outer = 1;
  int64_t inner = 1;
};

struct Resampling {
  std::vector<Pass> passes;
  int64_t in = 0, out = 0;
  int64_t largest = 0;  // elements of the largest intermediate
  double outside = 0;   // for elements without taps
};

// What Resize and ResizeGrad do, for outputs with elements. Throws UnsupportedError where an input
// that it follows from is no constant.
Resampling resampling_of(const NodeSpec& spec);
Resampling gradient_resampling_of(const NodeSpec& spec);

}  // namespace ortrain::ops
