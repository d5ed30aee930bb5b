// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "ortrain/base/dim.h"
#include "ortrain/ir/attribute_reader.h"
#include "ortrain/ops/window/window.h"

namespace ortrain::ops {

// One convolution y = conv(x, w) with everything concrete. ConvInputGrad and ConvWeightGrad are
// described by the convolution they belong to; ConvTranspose by the one that it is the transpose of
// (its input is y, its output x).
struct ConvProblem {
  int64_t batch = 0;
  int64_t groups = 1;
  int64_t in_channels = 0;       // of x, all groups
  int64_t out_channels = 0;      // of y, all groups
  size_t spatial_rank = 0;       // 1 to 3
  std::vector<WindowAxis> axes;  // always 3

  int64_t group_in() const { return in_channels / groups; }
  int64_t group_out() const { return out_channels / groups; }
  int64_t in_size() const { return axes[0].in * axes[1].in * axes[2].in; }
  int64_t out_size() const { return axes[0].out * axes[1].out * axes[2].out; }
  int64_t kernel_size() const { return axes[0].kernel * axes[1].kernel * axes[2].kernel; }
  int64_t x_numel() const { return batch * in_channels * in_size(); }
  int64_t y_numel() const { return batch * out_channels * out_size(); }
  int64_t w_numel() const { return out_channels * group_in() * kernel_size(); }
};

// The spatial extents of a weight; throws UnsupportedError when they are symbolic.
std::vector<int64_t> kernel_extents(const Shape& w);

// Conv and its gradients: x, w and y are the positions' tensors of that convolution.
ConvProblem conv_problem(const AttributeReader& attrs, const Dims& x, const Dims& w, const Dims& y);
// ConvTranspose of input `x` to output `y`.
ConvProblem conv_transpose_problem(const AttributeReader& attrs, const Dims& x, const Dims& w,
                                   const Dims& y);

// The windows of ConvTranspose as those of the convolution that it is the transpose of.
struct TransposedWindows {
  // Pads at the end have output_padding taken off, so that the convolution of the output has
  // exactly the input's extents.
  Windows windows;
  Shape out;  // spatial extents of the output
  // false: output_shape is given and the input's extents are symbolic, so the pads are not known.
  bool resolved = true;
};

TransposedWindows transposed_windows(const AttributeReader& attrs, const Shape& x, const Shape& w);

}  // namespace ortrain::ops
