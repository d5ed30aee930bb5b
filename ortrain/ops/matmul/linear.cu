// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/gemm.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

// Rows of x[..., K] as one matrix.
int64_t rows_of(const TensorSpec& x) {
  return num_elements(Dims(x.dims.begin(), x.dims.end() - 1));
}

KernelFn make_linear(NodeSpec& spec) {
  const bool has_bias = spec.has_input(2);
  const Gemm gemm({.dtype = spec.input(0).dtype,
                   .m = rows_of(spec.input(0)),
                   .n = spec.input(1).dims[0],
                   .k = spec.input(0).dims.back(),
                   .trans_b = true,
                   .bias = has_bias ? BiasAlong::columns : BiasAlong::none});
  spec.request_workspace(gemm.workspace_bytes());
  return [gemm, has_bias](const KernelArgs& args) {
    gemm.run({.a = args.in[0],
              .b = args.in[1],
              .d = args.out[0],
              .bias = has_bias ? args.in[2] : nullptr},
             args.workspace, args.stream);
  };
}

// dx = base + dy weight and dw = base + dy^T x; the sum may be where the base is.
KernelFn with_base(NodeSpec& spec, GemmProblem problem) {
  problem.dtype = spec.input(0).dtype;
  problem.beta = spec.has_input(2) ? 1.0 : 0.0;
  const Gemm gemm(problem);
  spec.request_workspace(gemm.workspace_bytes());
  return [gemm, has_base = spec.has_input(2)](const KernelArgs& args) {
    gemm.run(
        {.a = args.in[0], .b = args.in[1], .d = args.out[0], .c = has_base ? args.in[2] : nullptr},
        args.workspace, args.stream);
  };
}

KernelFn make_input_grad(NodeSpec& spec) {
  const Dims& weight = spec.input(1).dims;
  return with_base(spec, {.m = rows_of(spec.input(0)), .n = weight[1], .k = weight[0]});
}

KernelFn make_weight_grad(NodeSpec& spec) {
  return with_base(spec, {.m = spec.input(0).dims.back(),
                          .n = spec.input(1).dims.back(),
                          .k = rows_of(spec.input(0)),
                          .trans_a = true});
}

KernelFn make_wide_weight_grad(NodeSpec& spec) {
  const DType type = spec.input(0).dtype;
  const Gemm gemm({.dtype = type,
                   .m = spec.input(0).dims.back(),
                   .n = spec.input(1).dims.back(),
                   .k = rows_of(spec.input(0)),
                   .trans_a = true,
                   .keep_sums = size_of(type) == 2});
  spec.request_workspace(gemm.workspace_bytes());
  return [gemm](const KernelArgs& args) {
    gemm.run({.a = args.in[0], .b = args.in[1], .d = args.out[0]}, args.workspace, args.stream);
  };
}

}  // namespace

void register_linear(KernelRegistry& registry) {
  registry.add("ortrain::Linear", {{.name = "gemm", .make = make_linear}});
  registry.add("ortrain::LinearInputGrad",
               {{.name = "gemm", .make = make_input_grad, .inplace = {{2, 0}}}});
  registry.add("ortrain::LinearWeightGrad",
               {{.name = "gemm", .make = make_weight_grad, .inplace = {{2, 0}}}});
  registry.add("ortrain::WideLinearWeightGrad", {{.name = "gemm", .make = make_wide_weight_grad}});
}

}  // namespace ortrain::gpu
