// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/base/error.h"
#include "ortrain/gpu/gemm.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/ops/conv/conv_cudnn.h"

namespace ortrain::gpu {
namespace {

// The library adds a bias to y alone.
bool bias_is_a_pass(const ConvNode& node) {
  return node.has_bias && node.direction == CudnnConvolution::Direction::input;
}

template <class T>
__global__ void add_bias(int64_t count, int64_t channels, int64_t size, const T* bias, T* x) {
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
  CudnnConvolution c{.direction = node.direction,
                     .dtype = dtype,
                     .rounds_to_tf32 = dtype == DType::f32 && allow_tf32(),
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
  auto plan = problem ? cudnn_plan(*problem, why) : nullptr;
  if (!plan) throw UnsupportedError(spec.context() + why);
  // Tensors of users may lie anywhere.
  problem->alignment = static_cast<int64_t>(size_of(problem->dtype));
  const auto anywhere = cudnn_plan(*problem, why);
  size_t bytes = cudnn_workspace(*plan);
  KernelFn otherwise;
  if (anywhere) {
    bytes = std::max(bytes, cudnn_workspace(*anywhere));
  } else {
    otherwise = own(spec);
    bytes = std::max(bytes, spec.workspace_bytes());
  }
  spec.request_workspace(bytes);
  const auto product = [plan, anywhere, has_bias = problem->has_bias](const KernelArgs& args) {
    std::array<void*, 4> all{const_cast<void*>(args.in[0]), const_cast<void*>(args.in[1]),
                             args.out[0]};
    if (has_bias) {
      all[2] = const_cast<void*>(args.in[2]);
      all[3] = args.out[0];
    }
    const std::span<void* const> operands(all.data(), has_bias ? 4 : 3);
    if (are_aligned(operands, kCudnnAlignment)) {
      run_cudnn(*plan, operands, args.workspace, args.stream);
      return true;
    }
    if (!anywhere) return false;
    run_cudnn(*anywhere, operands, args.workspace, args.stream);
    return true;
  };
  if (!bias_is_a_pass(node)) {
    return [product, otherwise](const KernelArgs& args) {
      if (!product(args)) otherwise(args);
    };
  }
  return dispatch_float(problem->dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [product, otherwise, p = node.problem](const KernelArgs& args) {
      if (!product(args)) return otherwise(args);  // the bias too
      launch(add_bias<T>, items(p.x_numel()), args.stream, p.x_numel(), p.in_channels, p.in_size(),
             args.input<T>(2), args.output<T>(0));
    };
  });
}

}  // namespace ortrain::gpu
