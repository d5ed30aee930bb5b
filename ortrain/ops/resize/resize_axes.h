// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "ortrain/base/dim.h"
#include "ortrain/ir/attribute_reader.h"

namespace ortrain::ops {

// One element of a weighted sum.
struct ResizeTap {
  int64_t index;
  double weight;
};

// Interpolation along one axis: element `o` of the result is the sum of taps [begin[o],
// begin[o + 1]). An element with no tap is the extrapolation value.
struct ResizeAxis {
  int64_t axis = 0;
  int64_t in = 0;
  int64_t out = 0;
  std::vector<size_t> begin;
  std::vector<ResizeTap> taps;
};

// The axes that Resize changes: attribute `axes`, or all.
std::vector<int64_t> resize_axes(const AttributeReader& attrs, size_t rank);

// Extents along `axes` for given scales: floor(in * scale).
Dims resized_by_scales(const Dims& x, const std::vector<int64_t>& axes,
                       const std::vector<double>& scales);
// The scale that keep_aspect_ratio_policy gives to all of `axes`; nullopt for "stretch".
std::optional<double> aspect_scale(const AttributeReader& attrs, const Dims& x,
                                   const std::vector<int64_t>& axes,
                                   const std::vector<int64_t>& sizes);
// Extents along `axes` for given sizes, after keep_aspect_ratio_policy.
Dims resized_to_sizes(const AttributeReader& attrs, const Dims& x, const std::vector<int64_t>& axes,
                      const std::vector<int64_t>& sizes);

// Everything that changes; `scales` (per entry of `axes`) are taken from the extents when absent.
// `roi` is [starts, ends] over `axes`, for tf_crop_and_resize. Weights follow the ONNX definition
// of Resize: coordinate transformation, nearest_mode, cubic_coeff_a, exclude_outside, antialias.
std::vector<ResizeAxis> resize_tables(const AttributeReader& attrs, const Dims& x, const Dims& y,
                                      const std::optional<std::vector<double>>& scales,
                                      const std::optional<std::vector<double>>& roi);

// The transposed sums: element `i` of the gradient gathers from the results that used it.
ResizeAxis transposed(const ResizeAxis& axis);

}  // namespace ortrain::ops
