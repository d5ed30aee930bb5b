// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/ops/resize/resampling.h"

namespace ortrain::ops {
namespace {

std::optional<std::vector<double>> floats(const NodeSpec& spec, size_t index) {
  if (!spec.has_input(index) || spec.input(index).numel() == 0) return std::nullopt;
  const auto* values = static_cast<const float*>(spec.constant_input(index));
  if (values == nullptr)
    throw UnsupportedError(str(spec.context(), "input ", index, " must be a constant"));
  return std::vector<double>(values, values + spec.input(index).numel());
}

// The scales of a node whose tensors start at input `first`: given, or from an aspect ratio policy.
std::optional<std::vector<double>> scales_of(const NodeSpec& spec, const Dims& x, size_t first) {
  std::optional<std::vector<double>> given = floats(spec, first + 1);
  if (given) return given;
  const std::optional<std::vector<int64_t>> sizes = spec.constant_ints(first + 2);
  if (!sizes) throw UnsupportedError(str(spec.context(), "sizes must be known"));
  const std::vector<int64_t> axes = resize_axes(spec.attrs(), x.size());
  const std::optional<double> scale = aspect_scale(spec.attrs(), x, axes, *sizes);
  if (!scale) return std::nullopt;
  return std::vector<double>(axes.size(), *scale);
}

Resampling resampling(std::vector<ResizeAxis> axes, Dims dims, double outside) {
  Resampling result;
  result.in = num_elements(dims);
  result.outside = outside;
  for (ResizeAxis& axis : axes) {
    Pass pass;
    for (int64_t i = 0; i < axis.axis; ++i) pass.outer *= dims[static_cast<size_t>(i)];
    for (size_t i = static_cast<size_t>(axis.axis) + 1; i < dims.size(); ++i) pass.inner *= dims[i];
    dims[static_cast<size_t>(axis.axis)] = axis.out;
    pass.axis = std::move(axis);
    result.passes.push_back(std::move(pass));
    result.largest = std::max(result.largest, num_elements(dims));
  }
  result.out = num_elements(dims);
  return result;
}

}  // namespace

Resampling resampling_of(const NodeSpec& spec) {
  const AttributeReader attrs = spec.attrs();
  const Dims &x = spec.input(0).dims, &y = spec.output(0).dims;
  std::vector<ResizeAxis> axes = resize_tables(attrs, x, y, scales_of(spec, x, 1), floats(spec, 1));
  return resampling(std::move(axes), x, attrs.float_("extrapolation_value"));
}

Resampling gradient_resampling_of(const NodeSpec& spec) {
  const Dims &x = spec.output(0).dims, &y = spec.input(0).dims;
  std::vector<ResizeAxis> axes =
      resize_tables(spec.attrs(), x, y, scales_of(spec, x, 2), floats(spec, 2));
  for (ResizeAxis& axis : axes) axis = transposed(axis);
  return resampling(std::move(axes), y, 0);
}

}  // namespace ortrain::ops
