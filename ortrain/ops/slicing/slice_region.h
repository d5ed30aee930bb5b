// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "ortrain/base/dim.h"

namespace ortrain::ops {

// Slice of one axis: element i of the result is element start + i * step of the input.
struct AxisSlice {
  Dim start = 0;
  Dim count = 0;
  int64_t step = 1;
};

// ONNX Slice on one axis of extent `extent`: negative bounds count from the end, and bounds are
// clamped to the axis. With symbols, a bound is taken to lie inside of the axis (which concrete
// extents check by clamping), except an end beyond 1, which may be larger than the extent.
AxisSlice slice_axis(const Dim& extent, const Dim& start, const Dim& end, int64_t step);

// The slices of all axes. Absent `axes` means 0, 1, ...; absent `steps` means 1. Throws ShapeError.
std::vector<AxisSlice> slice_axes(const Shape& shape, const std::vector<Dim>& starts,
                                  const std::vector<Dim>& ends,
                                  const std::optional<std::vector<int64_t>>& axes,
                                  const std::optional<std::vector<int64_t>>& steps);

}  // namespace ortrain::ops
