// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/gemm.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

// Y = alpha op(A) op(B) + beta C.
GemmProblem problem_of(const NodeSpec& spec) {
  const AttributeReader attrs = spec.attrs();
  const Dims &a = spec.input(0).dims, &y = spec.output(0).dims;
  GemmProblem p;
  p.dtype = spec.input(0).dtype;
  p.trans_a = attrs.int_("transA") != 0;
  p.trans_b = attrs.int_("transB") != 0;
  p.m = y[0];
  p.n = y[1];
  p.k = a[p.trans_a ? 0 : 1];
  p.alpha = attrs.float_("alpha");
  if (!spec.has_input(2)) return p;
  p.beta = attrs.float_("beta");
  const Dims& c = spec.input(2).dims;
  const int64_t columns = c.empty() ? 1 : c.back();
  const int64_t rows = c.size() == 2 ? c[0] : 1;
  const bool repeats_rows = rows == 1 && p.m != 1, repeats_columns = columns == 1 && p.n != 1;
  if (p.beta == 1.0 && repeats_rows != repeats_columns) {
    p.bias = repeats_rows ? BiasAlong::columns : BiasAlong::rows;
    p.beta = 0.0;
  } else if (repeats_rows || repeats_columns) {
    p.c_row = repeats_rows ? 0 : columns;
    p.c_column = repeats_columns ? 0 : 1;
  }
  return p;
}

KernelFn make_gemm(NodeSpec& spec) {
  const GemmProblem problem = problem_of(spec);
  const Gemm gemm(problem);
  spec.request_workspace(gemm.workspace_bytes());
  return [gemm, is_bias = problem.bias != BiasAlong::none,
          is_addend = problem.beta != 0.0](const KernelArgs& args) {
    gemm.run({.a = args.in[0],
              .b = args.in[1],
              .d = args.out[0],
              .c = is_addend ? args.in[2] : nullptr,
              .bias = is_bias ? args.in[2] : nullptr},
             args.workspace, args.stream);
  };
}

// Only where C has an element of its own for each of Y. With an extent of 1 that is no repetition.
std::vector<std::pair<int, int>> shared_memory(const NodeSpec& spec) {
  if (!spec.has_input(2) || spec.input(2).numel() != spec.output(0).numel()) return {};
  return {{2, 0}};
}

}  // namespace

void register_gemm(KernelRegistry& registry) {
  registry.add("Gemm", {{.name = "gemm", .make = make_gemm, .inplace_of = shared_memory}});
}

}  // namespace ortrain::gpu
