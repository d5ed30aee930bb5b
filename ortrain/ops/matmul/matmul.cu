// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/gemm.h"
#include "ortrain/ops/matmul/matmul_problem.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

// The leading extents of a product with the distances between its matrices, as numpy.matmul pairs
// them; 0 where an operand repeats.
std::vector<BatchAxis> batch_axes(Dims a, Dims b, int64_t size_a, int64_t size_b, int64_t size_y) {
  const size_t rank = std::max(a.size(), b.size());
  a.insert(a.begin(), rank - a.size(), 1);
  b.insert(b.begin(), rank - b.size(), 1);
  std::vector<BatchAxis> axes(rank);
  for (size_t i = rank; i-- > 0;) {
    axes[i] = {.count = a[i] == 1 ? b[i] : a[i],
               .a = a[i] == 1 ? 0 : size_a,
               .b = b[i] == 1 ? 0 : size_b,
               .d = size_y};
    size_a *= a[i];
    size_b *= b[i];
    size_y *= axes[i].count;
  }
  return axes;
}

GemmProblem problem_of(const NodeSpec& spec) {
  const bool is_fused = spec.node().op == "FusedMatMul";
  GemmProblem p;
  p.dtype = spec.input(0).dtype;
  p.trans_a = is_fused && spec.attrs().int_("transA") != 0;
  p.trans_b = is_fused && spec.attrs().int_("transB") != 0;
  p.alpha = is_fused ? spec.attrs().float_("alpha") : 1.0;
  Dims a = spec.input(0).dims, b = spec.input(1).dims;
  if (a.size() == 1) a.insert(a.begin(), 1);
  if (b.size() == 1) b.push_back(1);
  const auto take_last = [](Dims& dims) {
    const int64_t last = dims.back();
    dims.pop_back();
    return last;
  };
  const int64_t a_columns = take_last(a), a_rows = take_last(a);
  const int64_t b_columns = take_last(b), b_rows = take_last(b);
  p.m = p.trans_a ? a_columns : a_rows;
  p.k = p.trans_a ? a_rows : a_columns;
  p.n = p.trans_b ? b_rows : b_columns;
  if (num_elements(b) == 1 && !p.trans_a && a.size() >= b.size()) {
    p.m *= num_elements(a);  // one matrix on the right: all rows are those of one product
    return p;
  }
  p.batch = batch_axes(a, b, p.m * p.k, p.k * p.n, p.m * p.n);
  return p;
}

KernelFn make_matmul(NodeSpec& spec) {
  const Gemm gemm(problem_of(spec));
  spec.request_workspace(gemm.workspace_bytes());
  return [gemm](const KernelArgs& args) {
    gemm.run({.a = args.in[0], .b = args.in[1], .d = args.out[0]}, args.workspace, args.stream);
  };
}

}  // namespace

void register_matmul(KernelRegistry& registry) {
  registry.add("MatMul", {{.name = "gemm", .make = make_matmul}});
  registry.add("ortrain::FusedMatMul", {{.name = "gemm", .make = make_matmul}});
}

}  // namespace ortrain::gpu
