// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ortrain/base/dim.h"
#include "ortrain/ir/attribute_reader.h"
#include "ortrain/ir/op_def.h"

namespace ortrain::ops {

// Elements [begin, end) of an axis of `in` that window `o` of `out` adaptive ones shows. Whole
// parts and the rest are counted apart: o * in may leave int64.
struct AdaptiveWindow {
  int64_t begin, end;

  AdaptiveWindow(int64_t o, int64_t in, int64_t out)
      : begin(o * (in / out) + o * (in % out) / out),
        end((o + 1) * (in / out) + ((o + 1) * (in % out) + out - 1) / out) {}
};

enum class AutoPad { kNotSet, kSameUpper, kSameLower, kValid };

// The sliding windows of a convolution or a pooling, as its attributes give them.
struct Windows {
  std::vector<int64_t> kernel;
  std::vector<int64_t> strides;
  std::vector<int64_t> dilations;
  std::vector<int64_t> pads;  // begins, then ends; negative ones crop
  AutoPad auto_pad = AutoPad::kNotSet;
  bool ceil_mode = false;

  size_t rank() const { return kernel.size(); }
  // Extent of the dilated kernel.
  int64_t span(size_t axis) const { return (kernel[axis] - 1) * dilations[axis] + 1; }
  bool same() const { return auto_pad == AutoPad::kSameUpper || auto_pad == AutoPad::kSameLower; }
};

// auto_pad, kernel_shape, strides, pads, dilations (and ceil_mode): the attributes that
// read_windows takes.
std::vector<FormalAttribute> window_attributes(bool kernel_required);

// Reads the attributes for `rank` spatial axes. An empty `kernel` means that kernel_shape must be
// given; otherwise kernel_shape, when given, must equal it. Throws ShapeError for attributes of the
// wrong length or range.
Windows read_windows(const AttributeReader& attrs, size_t rank, std::span<const int64_t> kernel);

// Number of windows along one axis (ONNX Conv and MaxPool):
//   floor((in + pads - span) / stride) + 1, with SAME padding ceil(in / stride); with ceil_mode
//   rounded up, but no window starts in the padding at the end.
// Throws ShapeError when the kernel does not fit the padded input.
Dim window_count(const Windows& windows, size_t axis, const Dim& in);

// One spatial axis with everything concrete: input position = out * stride + k * dilation -
// pad_begin.
struct WindowAxis {
  int64_t in = 1;
  int64_t out = 1;
  int64_t kernel = 1;
  int64_t stride = 1;
  int64_t dilation = 1;
  int64_t pad_begin = 0;
  int64_t pad_end = 0;  // as given: with ceil_mode windows may reach beyond it

  int64_t start(int64_t o) const { return o * stride - pad_begin; }
  // The kernel positions [k_begin, k_end) of window `o` that lie inside of the input.
  int64_t k_begin(int64_t o) const {
    const int64_t first = start(o);
    const int64_t k = first >= 0 ? 0 : (-first + dilation - 1) / dilation;
    return k < kernel ? k : kernel;
  }
  int64_t k_end(int64_t o) const {
    const int64_t room = in - start(o);
    if (room <= 0) return 0;
    const int64_t k = (room + dilation - 1) / dilation;
    return k < kernel ? k : kernel;
  }
  // The outputs [first, last) of whose windows position `k` lies inside of the input.
  std::pair<int64_t, int64_t> outputs_of(int64_t k) const {
    const int64_t shift = k * dilation - pad_begin;
    const int64_t room = in - shift;
    const int64_t first =
        std::clamp<int64_t>(shift >= 0 ? 0 : (-shift + stride - 1) / stride, 0, out);
    return {first, std::clamp<int64_t>(room <= 0 ? 0 : (room + stride - 1) / stride, first, out)};
  }
};

// The pads in front and behind of one axis with auto_pad resolved.
std::pair<int64_t, int64_t> resolved_pads(const Windows& windows, size_t axis, int64_t in);

// `spatial` are the extents of the input. The result has three axes: fewer are filled up in front
// with axes of extent 1.
std::vector<WindowAxis> concrete_windows(const Windows& windows, std::span<const int64_t> spatial);

// At most three spatial axes; `what` names the tensor. Throws ShapeError or UnsupportedError.
void check_spatial_rank(int64_t rank, const char* what);

}  // namespace ortrain::ops
