// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <span>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/error.h"
#include "ortrain/ops/conv/conv_problem.h"

namespace ortrain::ops {
namespace {

std::span<const int64_t> spatial(const Dims& dims) {
  return std::span<const int64_t>(dims).subspan(2);
}

}  // namespace

std::vector<int64_t> kernel_extents(const Shape& w) {
  std::vector<int64_t> kernel;
  for (size_t i = 2; i < w.size(); ++i) {
    if (!w[i].is_constant()) {
      throw UnsupportedError(
          str("the kernel's extents must be constant; the weight is ", shape_str(w)));
    }
    kernel.push_back(w[i].constant());
  }
  return kernel;
}

ConvProblem conv_problem(const AttributeReader& attrs, const Dims& x, const Dims& w,
                         const Dims& y) {
  ConvProblem problem;
  problem.batch = x[0];
  problem.groups = attrs.int_("group");
  problem.in_channels = x[1];
  problem.out_channels = w[0];
  problem.spatial_rank = x.size() - 2;
  problem.axes =
      concrete_windows(read_windows(attrs, problem.spatial_rank, spatial(w)), spatial(x));
  check(problem.y_numel() == num_elements(y), "the windows give the output's shape");
  return problem;
}

ConvProblem conv_transpose_problem(const AttributeReader& attrs, const Dims& x, const Dims& w,
                                   const Dims& y) {
  ConvProblem problem;
  problem.batch = x[0];
  problem.groups = attrs.int_("group");
  problem.in_channels = y[1];
  problem.out_channels = x[1];
  problem.spatial_rank = x.size() - 2;
  const TransposedWindows transposed = transposed_windows(attrs, to_shape(x), to_shape(w));
  problem.axes = concrete_windows(transposed.windows, spatial(y));
  check(problem.y_numel() == num_elements(x),
        "the convolution of the output has the input's shape");
  return problem;
}

TransposedWindows transposed_windows(const AttributeReader& attrs, const Shape& x, const Shape& w) {
  const size_t rank = x.size() - 2;
  TransposedWindows result;
  Windows& windows = result.windows;
  windows = read_windows(attrs, rank, kernel_extents(w));
  const AutoPad auto_pad = windows.auto_pad;
  windows.auto_pad = AutoPad::kNotSet;

  std::vector<int64_t> extra =
      attrs.optional_ints("output_padding").value_or(std::vector<int64_t>(rank, 0));
  if (extra.size() != rank) {
    throw ShapeError(str("output_padding has ", extra.size(), " entries; the input needs ", rank));
  }
  std::optional<std::vector<int64_t>> wanted = attrs.optional_ints("output_shape");
  if (wanted && wanted->size() == rank + 2) wanted->erase(wanted->begin(), wanted->begin() + 2);
  if (wanted && wanted->size() != rank) {
    throw ShapeError(str("output_shape has ", wanted->size(), " entries; the input needs ", rank));
  }
  const bool same = auto_pad == AutoPad::kSameUpper || auto_pad == AutoPad::kSameLower;

  for (size_t i = 0; i < rank; ++i) {
    const int64_t stride = windows.strides[i];
    if (extra[i] < 0 || extra[i] >= std::max(stride, windows.dilations[i])) {
      throw ShapeError(str("output_padding ", extra[i], " of spatial axis ", i,
                           " must be in [0, max(stride, dilation))"));
    }
    // Every input position adds `stride`; without padding the output has this extent.
    const Dim full = Dim(stride) * (x[i + 2] - Dim(1)) + Dim(extra[i] + windows.span(i));
    Dim out = full - Dim(windows.pads[i] + windows.pads[i + rank]);
    if (wanted && (*wanted)[i] > kMostBytes) {
      throw ShapeError(str("output_shape asks for an extent of ", (*wanted)[i]));
    }
    if (wanted || same) {
      out = wanted ? Dim((*wanted)[i]) : x[i + 2] * Dim(stride);
      const Dim surplus = full - out;
      result.resolved = result.resolved && surplus.is_constant();
      const int64_t excess = surplus.is_constant() ? surplus.constant() : 0;
      const int64_t total = std::max<int64_t>(excess, 0);
      // What the output has beyond the last window is output padding.
      if (excess < 0) extra[i] -= excess;
      const int64_t begin = auto_pad == AutoPad::kSameUpper ? total / 2 : total - total / 2;
      windows.pads[i] = begin;
      windows.pads[i + rank] = total - begin;
    }
    if (out.is_constant() && out.constant() < 1) {
      throw ShapeError(
          str("the output would have extent ", out.constant(), " along spatial axis ", i));
    }
    windows.pads[i + rank] -= extra[i];
    result.out.push_back(out);
  }
  return result;
}

}  // namespace ortrain::ops
