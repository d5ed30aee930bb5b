// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/error.h"
#include "ortrain/ir/shape_inference.h"
#include "ortrain/ops/resize/resize_axes.h"

namespace ortrain::ops {
namespace {

// Tables of an axis are made while the plan is; more would be a gigabyte.
constexpr double kMostTaps = 1 << 26;

// `what` rounded down, or ShapeError where no tensor has that many elements.
int64_t whole_extent(double what, int64_t axis) {
  const double extent = std::floor(what);
  if (!(extent >= 0 && extent <= static_cast<double>(kMostBytes))) {
    throw ShapeError(str("axis ", axis, " would have the extent ", extent));
  }
  return static_cast<int64_t>(extent);
}

// Where in the input element `o` of the result lies.
struct Coordinates {
  std::string mode;
  double in, scale;
  double out;         // in * scale, not rounded
  double out_extent;  // the integer extent
  double roi_start = 0;
  double roi_end = 1;

  double at(double o) const {
    if (mode == "half_pixel") return (o + 0.5) / scale - 0.5;
    if (mode == "pytorch_half_pixel") return out_extent > 1 ? (o + 0.5) / scale - 0.5 : 0;
    if (mode == "half_pixel_symmetric") {
      return in / 2 * (1 - out_extent / out) + (o + 0.5) / scale - 0.5;
    }
    if (mode == "align_corners") return out == 1 ? 0 : o * (in - 1) / (out - 1);
    if (mode == "asymmetric") return o / scale;
    if (mode == "tf_crop_and_resize") {
      const double room = roi_end - roi_start;
      return roi_start * (in - 1) +
             (out == 1 ? room * (in - 1) / 2 : o * room * (in - 1) / (out - 1));
    }
    throw InvalidModelError(str("coordinate_transformation_mode is '", mode, "'"));
  }
};

bool takes_ceiling(const std::string& mode, double ratio) {
  if (mode == "round_prefer_floor") return ratio > 0.5;
  if (mode == "round_prefer_ceil") return ratio >= 0.5;
  if (mode == "floor") return false;
  if (mode == "ceil") return true;
  throw InvalidModelError(str("nearest_mode is '", mode, "'"));
}

// Keys' cubic convolution with parameter a.
double cubic_weight(double distance, double a) {
  const double d = std::abs(distance);
  if (d <= 1) return ((a + 2) * d - (a + 3)) * d * d + 1;
  if (d < 2) return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a;
  return 0;
}

struct Interpolation {
  std::string mode, nearest_mode;
  double cubic_a = -0.75;
  bool exclude_outside = false, antialias = false;

  // Antialiasing stretches the filter over the inputs that fall together.
  double stretch(double scale) const { return antialias ? std::min(scale, 1.0) : 1.0; }
  double radius() const { return mode == "linear" ? 1 : 2; }
  // An upper bound.
  double taps_of_an_element(double scale) const {
    return mode == "nearest" ? 1 : 2 * radius() / stretch(scale) + 2;
  }

  // The taps around `x`, unclamped.
  std::vector<ResizeTap> taps(double x, double scale) const {
    const double floor = std::floor(x);
    const double ratio = x - floor;
    const int64_t base = static_cast<int64_t>(floor);
    if (mode == "nearest") {
      const bool ceiling = ratio != 0 && takes_ceiling(nearest_mode, ratio);
      return {{base + (ceiling ? 1 : 0), 1.0}};
    }
    const int64_t first = static_cast<int64_t>(std::floor(-radius() / stretch(scale))) + 1;
    std::vector<ResizeTap> result;
    double sum = 0;
    for (int64_t k = first; k <= 1 - first; ++k) {
      const double distance = (static_cast<double>(k) - ratio) * stretch(scale);
      const double weight = mode == "linear" ? std::max(0.0, 1 - std::abs(distance))
                                             : cubic_weight(distance, cubic_a);
      result.push_back({base + k, weight});
      sum += weight;
    }
    if (antialias) {
      for (ResizeTap& tap : result) tap.weight /= sum;
    }
    return result;
  }
};

Interpolation interpolation_of(const AttributeReader& attrs) {
  Interpolation result;
  result.mode = attrs.string_("mode");
  if (result.mode != "nearest" && result.mode != "linear" && result.mode != "cubic") {
    throw InvalidModelError(
        str("mode is '", result.mode, "'; it must be nearest, linear or cubic"));
  }
  result.nearest_mode = attrs.string_("nearest_mode");
  takes_ceiling(result.nearest_mode, 0);  // refuses an unknown name
  result.cubic_a = attrs.float_("cubic_coeff_a");
  result.exclude_outside = attrs.int_("exclude_outside") != 0;
  result.antialias = attrs.int_("antialias") != 0 && result.mode != "nearest";
  return result;
}

// Adds the taps of one element: outside ones dropped (and the rest rescaled) or moved to the edge.
void add_taps(const Interpolation& how, double x, double scale, ResizeAxis& axis) {
  std::vector<ResizeTap> taps = how.taps(x, scale);
  const auto outside = [&](const ResizeTap& t) { return t.index < 0 || t.index >= axis.in; };
  if (how.exclude_outside) {
    double sum = 0;
    for (ResizeTap& tap : taps) {
      if (outside(tap)) tap.weight = 0;
      sum += tap.weight;
    }
    for (ResizeTap& tap : taps) tap.weight /= sum;
  }
  const size_t first = axis.taps.size();
  for (const ResizeTap& tap : taps) {
    if (tap.weight == 0) continue;
    const int64_t index = std::clamp<int64_t>(tap.index, 0, axis.in - 1);
    if (axis.taps.size() > first && axis.taps.back().index == index) {
      axis.taps.back().weight += tap.weight;
    } else {
      axis.taps.push_back({index, tap.weight});
    }
  }
}

bool is_identity(const ResizeAxis& axis) {
  if (axis.in != axis.out || axis.taps.size() != static_cast<size_t>(axis.out)) return false;
  for (int64_t o = 0; o < axis.out; ++o) {
    const size_t i = static_cast<size_t>(o);
    if (axis.begin[i] != i || axis.taps[i].index != o || axis.taps[i].weight != 1) return false;
  }
  return true;
}

}  // namespace

std::vector<int64_t> resize_axes(const AttributeReader& attrs, size_t rank) {
  return given_axes_or_all(attrs.optional_ints("axes"), rank);
}

Dims resized_by_scales(const Dims& x, const std::vector<int64_t>& axes,
                       const std::vector<double>& scales) {
  if (scales.size() != axes.size()) {
    throw ShapeError(str("scales has ", scales.size(), " entries; ", axes.size(), " are needed"));
  }
  Dims y = x;
  for (size_t i = 0; i < axes.size(); ++i) {
    if (!(scales[i] > 0) || !std::isfinite(scales[i])) {
      throw ShapeError(str("scales[", i, "] is ", scales[i], "; it must be positive"));
    }
    int64_t& extent = y[static_cast<size_t>(axes[i])];
    extent = whole_extent(static_cast<double>(extent) * scales[i], axes[i]);
  }
  return y;
}

std::optional<double> aspect_scale(const AttributeReader& attrs, const Dims& x,
                                   const std::vector<int64_t>& axes,
                                   const std::vector<int64_t>& sizes) {
  if (sizes.size() != axes.size()) {
    throw ShapeError(str("sizes has ", sizes.size(), " entries; ", axes.size(), " are needed"));
  }
  const std::string& policy = attrs.string_("keep_aspect_ratio_policy");
  if (policy == "stretch") return std::nullopt;
  if (policy != "not_larger" && policy != "not_smaller") {
    throw InvalidModelError(str("keep_aspect_ratio_policy is '", policy, "'"));
  }
  double scale = 1;
  for (size_t i = 0; i < axes.size(); ++i) {
    const double ratio =
        static_cast<double>(sizes[i]) / static_cast<double>(x[static_cast<size_t>(axes[i])]);
    const bool takes = i == 0 || (policy == "not_larger" ? ratio < scale : ratio > scale);
    if (takes) scale = ratio;
  }
  return scale;
}

Dims resized_to_sizes(const AttributeReader& attrs, const Dims& x, const std::vector<int64_t>& axes,
                      const std::vector<int64_t>& sizes) {
  const std::optional<double> scale = aspect_scale(attrs, x, axes, sizes);
  Dims y = x;
  for (size_t i = 0; i < axes.size(); ++i) {
    int64_t& extent = y[static_cast<size_t>(axes[i])];
    if (sizes[i] < 0) throw ShapeError(str("sizes[", i, "] is ", sizes[i]));
    extent = scale ? whole_extent(*scale * static_cast<double>(extent) + 0.5, axes[i]) : sizes[i];
  }
  return y;
}

std::vector<ResizeAxis> resize_tables(const AttributeReader& attrs, const Dims& x, const Dims& y,
                                      const std::optional<std::vector<double>>& scales,
                                      const std::optional<std::vector<double>>& roi) {
  const Interpolation how = interpolation_of(attrs);
  const std::string& mode = attrs.string_("coordinate_transformation_mode");
  const bool crops = mode == "tf_crop_and_resize";
  const std::vector<int64_t> axes = resize_axes(attrs, x.size());
  if (crops && (!roi || roi->size() != 2 * axes.size())) {
    throw ShapeError(str("tf_crop_and_resize needs a roi with ", 2 * axes.size(), " entries"));
  }
  std::vector<ResizeAxis> tables;
  for (size_t i = 0; i < axes.size(); ++i) {
    ResizeAxis table;
    table.axis = axes[i];
    table.in = x[static_cast<size_t>(axes[i])];
    table.out = y[static_cast<size_t>(axes[i])];
    table.begin.push_back(0);
    if (table.in == 0 && table.out > 0) {
      throw ShapeError(str("axis ", axes[i], " is empty and cannot be resized to ", table.out));
    }
    Coordinates where;
    where.mode = mode;
    where.in = static_cast<double>(table.in);
    where.scale =
        scales ? (*scales)[i] : static_cast<double>(table.out) / static_cast<double>(table.in);
    where.out = scales ? where.in * where.scale : static_cast<double>(table.out);
    where.out_extent = static_cast<double>(table.out);
    if (crops) {
      where.roi_start = (*roi)[i];
      where.roi_end = (*roi)[i + axes.size()];
    }
    const double taps = where.out_extent * how.taps_of_an_element(where.scale);
    if (table.out > 0 && !(taps <= kMostTaps)) {
      throw UnsupportedError(str("axis ", axes[i], " is resized from ", table.in, " to ", table.out,
                                 ": ", taps, " weights; up to ", kMostTaps, " are supported"));
    }
    for (int64_t o = 0; o < table.out; ++o) {
      const double at = where.at(static_cast<double>(o));
      if (!crops || (at >= 0 && at <= where.in - 1)) add_taps(how, at, where.scale, table);
      table.begin.push_back(table.taps.size());
    }
    if (!is_identity(table)) tables.push_back(std::move(table));
  }
  return tables;
}

ResizeAxis transposed(const ResizeAxis& axis) {
  if (axis.in > static_cast<int64_t>(kMostTaps)) {
    throw UnsupportedError(str("the gradient of axis ", axis.axis, ", resized from ", axis.in,
                               "; extents up to ", kMostTaps, " are supported"));
  }
  ResizeAxis result{axis.axis, axis.out, axis.in, {}, {}};
  result.begin.assign(static_cast<size_t>(axis.in) + 1, 0);
  result.taps.resize(axis.taps.size());
  for (const ResizeTap& tap : axis.taps) ++result.begin[static_cast<size_t>(tap.index) + 1];
  std::partial_sum(result.begin.begin(), result.begin.end(), result.begin.begin());
  std::vector<size_t> next = result.begin;
  for (int64_t o = 0; o < axis.out; ++o) {
    for (size_t t = axis.begin[static_cast<size_t>(o)]; t < axis.begin[static_cast<size_t>(o) + 1];
         ++t) {
      const ResizeTap& tap = axis.taps[t];
      result.taps[next[static_cast<size_t>(tap.index)]++] = {o, tap.weight};
    }
  }
  return result;
}

}  // namespace ortrain::ops
