// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/error.h"
#include "ortrain/ir/shape_inference.h"
#include "ortrain/ops/slicing/slice_region.h"

namespace ortrain::ops {
namespace {

AxisSlice slice_constants(int64_t extent, int64_t start, int64_t end, int64_t step) {
  // Saturating, since bounds may be the largest and smallest integers.
  const auto from_end = [extent](int64_t bound) { return bound < 0 ? bound + extent : bound; };
  AxisSlice result;
  result.step = step;
  if (step > 0) {
    const int64_t first = std::clamp<int64_t>(from_end(start), 0, extent);
    const int64_t last = std::clamp<int64_t>(from_end(end), 0, extent);
    result.start = first;
    result.count = last <= first ? 0 : (last - first - 1) / step + 1;
  } else {
    const int64_t first = std::clamp<int64_t>(from_end(start), -1, extent - 1);
    const int64_t last = std::clamp<int64_t>(from_end(end), -1, extent - 1);
    result.start = std::max<int64_t>(first, 0);
    // The largest step down is one that leaves after the first element.
    const int64_t down = step == INT64_MIN ? INT64_MAX : -step;
    result.count = first <= last ? 0 : (first - last - 1) / down + 1;
  }
  return result;
}

// What exporters write for "to the end" of an axis, INT32_MAX or more, becomes the largest integer,
// and their "to the beginning" the smallest.
Dim without_sentinel(const Dim& bound) {
  if (!bound.is_constant()) return bound;
  const int64_t value = bound.constant();
  if (value >= INT32_MAX) return INT64_MAX;
  return value <= -int64_t{INT32_MAX} ? Dim(INT64_MIN) : bound;
}

bool is_unbounded(const Dim& bound) { return bound.is(INT64_MAX) || bound.is(INT64_MIN); }

Dim resolve(const Dim& bound, const Dim& extent) {
  return bound.is_constant() && bound.constant() < 0 ? bound + extent : bound;
}

AxisSlice slice_symbols(const Dim& extent, const Dim& start, const Dim& end, int64_t step) {
  AxisSlice result;
  result.step = step;  // from 2^47 on any step leaves after the first element
  if (step > 0) {
    if (is_unbounded(start)) {
      result.start = start.constant() < 0 ? Dim(0) : extent;
    } else {
      result.start = resolve(start, extent);
    }
    Dim last = resolve(end, extent);
    if (is_unbounded(end)) {
      last = end.constant() < 0 ? Dim(0) : extent;
    } else if (last.is_constant() && last.constant() > 1) {
      last = min(last, extent);
    }
    result.count = ceil_div(last - result.start, Dim(std::min(step, kMostBytes)));
  } else {
    const auto place = [&extent](const Dim& bound) {
      if (!is_unbounded(bound)) return resolve(bound, extent);
      return bound.constant() < 0 ? Dim(-1) : extent - Dim(1);
    };
    result.start = place(start);
    const Dim last = place(end);
    result.count = ceil_div(result.start - last, Dim(-std::max(step, -kMostBytes)));
  }
  if (result.count.is_constant() && result.count.constant() < 0) result.count = 0;
  return result;
}

}  // namespace

AxisSlice slice_axis(const Dim& extent, const Dim& given_start, const Dim& given_end,
                     int64_t step) {
  if (step == 0) throw ShapeError("a step is zero");
  // Of an axis whose length is known each bound is the number that it is.
  if (extent.is_constant() && given_start.is_constant() && given_end.is_constant()) {
    return slice_constants(extent.constant(), given_start.constant(), given_end.constant(), step);
  }
  return slice_symbols(extent, without_sentinel(given_start), without_sentinel(given_end), step);
}

std::vector<AxisSlice> slice_axes(const Shape& shape, const std::vector<Dim>& starts,
                                  const std::vector<Dim>& ends,
                                  const std::optional<std::vector<int64_t>>& axes,
                                  const std::optional<std::vector<int64_t>>& steps) {
  std::vector<AxisSlice> result;
  for (const Dim& extent : shape) result.push_back({.count = extent});
  const size_t count = starts.size();
  if (ends.size() != count || (axes && axes->size() != count) ||
      (steps && steps->size() != count)) {
    throw ShapeError("inputs 'starts', 'ends', 'axes' and 'steps' differ in length");
  }
  if (!axes && count > shape.size()) {
    throw ShapeError(str(count, " slices for the shape ", shape_str(shape)));
  }
  std::vector<int64_t> positive(count);
  for (size_t i = 0; i < count; ++i) positive[i] = static_cast<int64_t>(i);
  if (axes) positive = normalize_axes(*axes, shape.size());
  for (size_t i = 0; i < count; ++i) {
    const size_t axis = static_cast<size_t>(positive[i]);
    result[axis] = slice_axis(shape[axis], starts[i], ends[i], steps ? (*steps)[i] : 1);
  }
  return result;
}

}  // namespace ortrain::ops
