// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/ops/window/window.h"

namespace ortrain::ops {
namespace {

AutoPad parse_auto_pad(const std::string& text) {
  if (text == "NOTSET" || text.empty()) return AutoPad::kNotSet;
  if (text == "SAME_UPPER") return AutoPad::kSameUpper;
  if (text == "SAME_LOWER") return AutoPad::kSameLower;
  if (text == "VALID") return AutoPad::kValid;
  throw InvalidModelError(
      str("auto_pad is '", text, "'; it must be NOTSET, SAME_UPPER, SAME_LOWER or VALID"));
}

std::vector<int64_t> ints_of_length(const AttributeReader& attrs, const std::string& name,
                                    size_t length, int64_t fallback) {
  std::vector<int64_t> values =
      attrs.optional_ints(name).value_or(std::vector<int64_t>(length, fallback));
  if (values.size() != length) {
    throw ShapeError(str(name, " has ", values.size(), " entries; the input needs ", length));
  }
  return values;
}

void check_positive(const std::vector<int64_t>& values, const char* name) {
  for (int64_t value : values) {
    if (value < 1) throw ShapeError(str(name, " ", dims_str(values), " must be positive"));
  }
}

// Sums and products of two of these stay within int64.
void check_magnitude(const std::vector<int64_t>& values, const char* name) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  for (int64_t value : values) {
    if (value < -kMost || value > kMost) {
      throw ShapeError(str(name, " has ", value, ", beyond ", kMost));
    }
  }
}

}  // namespace

std::vector<FormalAttribute> window_attributes(bool kernel_required) {
  return {
      {"auto_pad", std::string("NOTSET")}, {"kernel_shape", AttributeKind::ints, kernel_required},
      {"strides", AttributeKind::ints},    {"pads", AttributeKind::ints},
      {"dilations", AttributeKind::ints},
  };
}

void check_spatial_rank(int64_t rank, const char* what) {
  if (rank < 3) {
    throw ShapeError(str(what, " has rank ", rank, "; it needs [N, C, spatial...]"));
  }
  if (rank > 5) {
    throw UnsupportedError(str(what, " has ", rank - 2, " spatial axes; at most 3 are supported"));
  }
}

Windows read_windows(const AttributeReader& attrs, size_t rank, std::span<const int64_t> kernel) {
  Windows windows;
  const std::optional<std::vector<int64_t>> given = attrs.optional_ints("kernel_shape");
  windows.kernel.assign(kernel.begin(), kernel.end());
  if (windows.kernel.empty()) windows.kernel = attrs.ints("kernel_shape");
  if (given && *given != windows.kernel) {
    throw ShapeError(
        str("kernel_shape is ", dims_str(*given), ", the weight has ", dims_str(windows.kernel)));
  }
  if (windows.kernel.size() != rank) {
    throw ShapeError(
        str("kernel_shape ", dims_str(windows.kernel), " does not fit ", rank, " spatial axes"));
  }
  windows.strides = ints_of_length(attrs, "strides", rank, 1);
  windows.dilations = ints_of_length(attrs, "dilations", rank, 1);
  windows.pads = ints_of_length(attrs, "pads", 2 * rank, 0);
  windows.auto_pad = parse_auto_pad(attrs.string_("auto_pad"));
  windows.ceil_mode = attrs.optional_int("ceil_mode").value_or(0) != 0;
  check_magnitude(windows.kernel, "kernel_shape");
  check_magnitude(windows.strides, "strides");
  check_magnitude(windows.dilations, "dilations");
  check_magnitude(windows.pads, "pads");
  check_positive(windows.kernel, "kernel_shape");
  check_positive(windows.strides, "strides");
  check_positive(windows.dilations, "dilations");
  if (windows.auto_pad != AutoPad::kNotSet) windows.pads.assign(2 * rank, 0);
  return windows;
}

Dim window_count(const Windows& windows, size_t axis, const Dim& in) {
  const Dim stride(windows.strides[axis]);
  if (windows.same()) return ceil_div(in, stride);
  const int64_t begin = windows.pads[axis];
  const int64_t end = windows.pads[axis + windows.rank()];
  const Dim room = in + Dim(begin + end - windows.span(axis));
  if (room.is_constant() && room.constant() < 0) {
    throw ShapeError(str("the kernel spans ", windows.span(axis), " elements of spatial axis ",
                         axis, ", which has ", in.str(), " and padding ", begin, " + ", end));
  }
  if (!windows.ceil_mode) return floor_div(room, stride) + Dim(1);
  return min(ceil_div(room, stride) + Dim(1), ceil_div(in + Dim(begin), stride));
}

std::pair<int64_t, int64_t> resolved_pads(const Windows& windows, size_t axis, int64_t in) {
  if (!windows.same()) return {windows.pads[axis], windows.pads[axis + windows.rank()]};
  const int64_t stride = windows.strides[axis];
  const int64_t out = (in + stride - 1) / stride;
  const int64_t total = std::max<int64_t>((out - 1) * stride + windows.span(axis) - in, 0);
  const int64_t half = total / 2;
  return windows.auto_pad == AutoPad::kSameUpper ? std::pair{half, total - half}
                                                 : std::pair{total - half, half};
}

std::vector<WindowAxis> concrete_windows(const Windows& windows, std::span<const int64_t> spatial) {
  check(spatial.size() == windows.rank() && spatial.size() <= 3, "one to three spatial axes");
  std::vector<WindowAxis> axes(3);
  const size_t skipped = 3 - spatial.size();
  for (size_t i = 0; i < spatial.size(); ++i) {
    const auto [begin, end] = resolved_pads(windows, i, spatial[i]);
    axes[skipped + i] = {
        .in = spatial[i],
        .out = window_count(windows, i, Dim(spatial[i])).constant(),
        .kernel = windows.kernel[i],
        .stride = windows.strides[i],
        .dilation = windows.dilations[i],
        .pad_begin = begin,
        .pad_end = end,
    };
  }
  return axes;
}

}  // namespace ortrain::ops
