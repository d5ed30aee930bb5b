// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "ortrain/ops/conv/conv_problem.h"
#include "ortrain/runtime/kernel.h"

// The algorithms for convolutions and their gradients; which one a node gets, conv_cpu.cpp says.
namespace ortrain::cpu {

// What a node computes: kInput is also ConvTranspose, whose bias belongs to the channels of x.
enum class Direction { kForward, kInput, kWeight };

// The tensors of one node in the order of its inputs; the third is the bias.
struct ConvNode {
  Direction direction;
  ops::ConvProblem problem;
  bool has_bias = false;
};

// Sums over the windows, in double. Any float type.
KernelFn conv_reference(DType dtype, ConvNode node);

// The windows as the columns of a matrix, then a product; asks `spec` for a workspace.
std::optional<std::string> conv_im2col_refuses(const ConvNode& node);
KernelFn conv_im2col(NodeSpec& spec, ConvNode node);

// For groups of one channel of x: shifted rows times one weight each.
std::optional<std::string> conv_depthwise_refuses(const ConvNode& node);
KernelFn conv_depthwise(DType dtype, ConvNode node);

// By oneDNN, float only.
std::optional<std::string> conv_onednn_refuses(const ConvNode& node);
KernelFn conv_onednn(NodeSpec& spec, ConvNode node);

}  // namespace ortrain::cpu
