// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <limits>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/base/error.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/ops/conv/conv_cudnn.h"

namespace ortrain::gpu {
namespace {

// The library has algorithms that add a bias to y, none that add one to x.
bool bias_is_a_pass(const ConvNode& node) {
  return node.has_bias && node.direction == CudnnConvolution::Direction::input;
}

template <class T>
__global__ void __launch_bounds__(kItemThreads)
    add_bias(int64_t count, int64_t channels, int64_t size, const T* bias, T* x) {
  using C = ComputeType<T>;
  for_each_item(count, [&](int64_t i) {
    x[i] = static_cast<T>(static_cast<C>(x[i]) + static_cast<C>(bias[i / size % channels]));
  });
}

}  // namespace

std::optional<CudnnConvolution> cudnn_convolution(const ConvNode& node, DType dtype,
                                                  std::string& why) {
  const ops::ConvProblem& p = node.problem;
  if (p.x_numel() == 0 || p.y_numel() == 0 || p.w_numel() == 0) {
    why = "nothing to be multiplied";
    return std::nullopt;
  }
  // Algorithms of the library count offsets in 32 bits.
  if (std::max({p.x_numel(), p.y_numel(), p.w_numel()}) > std::numeric_limits<int32_t>::max()) {
    why = "a tensor of 2^31 elements or more";
    return std::nullopt;
  }
  CudnnConvolution c{.direction = node.direction,
                     .dtype = dtype,
                     .rounds_to_tf32 = dtype == DType::f32 && allow_tf32_convolutions(),
                     .has_bias = node.has_bias && !bias_is_a_pass(node)};
  c.x = {p.batch, p.in_channels};
  c.w = {p.out_channels, p.group_in()};
  c.y = {p.batch, p.out_channels};
  // Lines are planes of one row.
  for (size_t i = p.spatial_rank == 3 ? 0 : 1; i < 3; ++i) {
    const ops::WindowAxis& axis = p.axes[i];
    const int64_t span = (axis.kernel - 1) * axis.dilation + 1;
    // So much of the padding at the end is read; windows need not reach it, or the input's end.
    const int64_t reached = (axis.out - 1) * axis.stride + span - axis.pad_begin;
    const int64_t pad_end = std::max<int64_t>(reached - axis.in, 0);
    if (axis.pad_begin < 0 ||
        (axis.in + axis.pad_begin + pad_end - span) / axis.stride + 1 != axis.out) {
      why = "pads that crop";
      return std::nullopt;
    }
    if (axis.pad_begin >= span || pad_end >= span) {
      why = "windows in the padding alone";
      return std::nullopt;
    }
    c.x.push_back(axis.in);
    c.w.push_back(axis.kernel);
    c.y.push_back(axis.out);
    c.strides.push_back(axis.stride);
    c.dilations.push_back(axis.dilation);
    c.pads_begin.push_back(axis.pad_begin);
    c.pads_end.push_back(pad_end);
  }
  return c;
}

std::optional<std::string> conv_cudnn_refuses(const NodeSpec& spec, const ConvNode& node) {
  std::string why;
  const std::optional<CudnnUse> use = cudnn_use(why);
  if (!use) return why;
  if (*use == CudnnUse::off) return "ORTRAIN_CUDNN is off";
  if (*use != CudnnUse::all && node.problem.group_in() == 1 && node.problem.in_channels > 1) {
    return "one channel per group is summed directly";
  }
  const auto problem = cudnn_convolution(node, spec.input(0).dtype, why);
  if (!problem || !cudnn_plan(*problem, why)) return why;
  return std::nullopt;
}

KernelFn conv_cudnn(NodeSpec& spec, const ConvNode& node, KernelFn (*own)(NodeSpec&)) {
  std::string why;
  auto problem = cudnn_convolution(node, spec.input(0).dtype, why);
  const auto plan = problem ? cudnn_plan(*problem, why) : nullptr;
  if (!plan) return own(spec);  // it had one when the kernel was chosen
  const bool fused = problem->has_bias;
  // Tensors of users may lie anywhere.
  problem->alignment = static_cast<int64_t>(size_of(problem->dtype));
  problem->has_bias = false;
  const auto anywhere = cudnn_plan(*problem, why);
  ByteCount bytes = cudnn_workspace(*plan);
  KernelFn otherwise;
  if (anywhere) {
    bytes = std::max(bytes, cudnn_workspace(*anywhere));
  } else {
    otherwise = own(spec);
    bytes = std::max(bytes, spec.workspace_bytes());
  }
  spec.request_workspace(bytes);
  return dispatch_float(problem->dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    const bool of_y = node.direction == CudnnConvolution::Direction::forward;
    const int64_t channels = of_y ? node.problem.out_channels : node.problem.in_channels;
    const int64_t size = of_y ? node.problem.out_size() : node.problem.in_size();
    return [=, count = node.problem.batch * channels * size,
            has_bias = node.has_bias](const KernelArgs& args) {
      void* const x = const_cast<void*>(args.in[0]);
      void* const w = const_cast<void*>(args.in[1]);
      void* const bias = has_bias ? const_cast<void*>(args.in[2]) : nullptr;
      void* const y = args.out[0];
      const bool aligned = are_aligned(std::array{x, w, bias, y}, kCudnnAlignment);
      if (!aligned && !anywhere) return otherwise(args);
      if (aligned && fused) {
        return run_cudnn(*plan, std::array{x, w, bias, y}, args.workspace, args.stream);
      }
      run_cudnn(aligned ? *plan : *anywhere, std::array{x, w, y}, args.workspace, args.stream);
      if (!has_bias) return;
      launch(add_bias<T>, items(count), args.stream, count, channels, size, args.input<T>(2),
             args.output<T>(0));
    };
  });
}

}  // namespace ortrain::gpu
