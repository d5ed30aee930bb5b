// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "ortrain/gpu/cudnn.h"
#include "ortrain/ops/conv/conv_problem.h"
#include "ortrain/runtime/kernel.h"

// Convolutions by cuDNN.
namespace ortrain::gpu {

// One node: inputs 0 and 1, the bias at 2, output 0. Direction::input is also ConvTranspose.
struct ConvNode {
  CudnnConvolution::Direction direction;
  ops::ConvProblem problem;
  bool has_bias = false;
};

// In the library's words. Null, with the reason in `why`, for what it has none for: pads that crop
// or are as wide as the kernel, empty tensors.
std::optional<CudnnConvolution> cudnn_convolution(const ConvNode& node, DType dtype,
                                                  std::string& why);

// Refused as ORTRAIN_CUDNN says, and where the library is not there or has no algorithm. One
// channel per group (depthwise) has a kernel of our own, which goes first unless `all` is asked
// for.
std::optional<std::string> conv_cudnn_refuses(const NodeSpec& spec, const ConvNode& node);
// For a node that is not refused. `own` makes the kernel for operands at addresses that no
// algorithm of the library takes.
KernelFn conv_cudnn(NodeSpec& spec, const ConvNode& node, KernelFn (*own)(NodeSpec&));

}  // namespace ortrain::gpu
