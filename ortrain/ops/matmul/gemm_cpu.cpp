// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/gemm_any.h"
#include "ortrain/cpu/row_access.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/ops/matmul/matmul_problem.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

struct Config {
  ops::MatMulProblem product;
  double alpha, beta;
  bool has_c;
  int64_t c_row, c_col;  // strides of C over Y, 0 where it repeats

  explicit Config(const NodeSpec& spec)
      : product(spec.input(0).dims, spec.input(1).dims, spec.attrs().int_("transA") != 0,
                spec.attrs().int_("transB") != 0),
        alpha(spec.attrs().float_("alpha")),
        beta(spec.attrs().float_("beta")),
        has_c(spec.has_input(2) && beta != 0.0),
        c_row(0),
        c_col(0) {
    if (!has_c) return;
    const Dims& c = spec.input(2).dims;
    const int64_t cols = c.empty() ? 1 : c.back();
    const int64_t rows = c.size() == 2 ? c[0] : 1;
    c_col = cols == 1 ? 0 : 1;
    c_row = rows == 1 ? 0 : cols;
  }

  bool c_is_bias() const { return has_c && c_row == 0 && c_col == 1 && beta == 1.0; }
  // C has an element of its own for each of Y: extents of 1 have stride 0 on both sides.
  bool c_is_full() const {
    return (c_row != 0 || product.m == 1) && (c_col != 0 || product.n == 1);
  }
};

template <class T>
void spread(const Config& g, const T* c, T* y) {
  const int64_t n = g.product.n;
  for (int64_t i = 0; i < g.product.m; ++i) {
    for (int64_t j = 0; j < n; ++j) y[i * n + j] = c[i * g.c_row + j * g.c_col];
  }
}

KernelFn make_gemm(NodeSpec& spec) {
  return [g = Config(spec), dtype = spec.input(0).dtype,
          bytes = spec.output(0).bytes()](const KernelArgs& args) {
    const ops::MatMulProblem& p = g.product;
    const void* bias = nullptr;
    double beta = 0.0;
    if (g.c_is_bias() && args.in[2] != args.out[0]) {
      bias = args.in[2];
    } else if (g.has_c) {
      beta = g.beta;
      if (!g.c_is_full()) {
        dispatch_float(dtype, [&](auto tag) {
          using T = typename decltype(tag)::type;
          spread(g, args.input<T>(2), args.output<T>(0));
        });
      } else if (bytes != 0 && args.in[2] != args.out[0]) {
        std::memcpy(args.out[0], args.in[2], bytes);
      }
    }
    gemm_any(dtype, p.trans_a, p.trans_b, p.m, p.n, p.k, g.alpha, args.in[0], p.lda, args.in[1],
             p.ldb, beta, args.out[0], p.n, bias);
  };
}

KernelFn make_ref(NodeSpec& spec) {
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [g = Config(spec)](const KernelArgs& args) {
      const ops::MatMulProblem& p = g.product;
      const T* a = args.input<T>(0);
      const T* b = args.input<T>(1);
      T* y = args.output<T>(0);
      parallel_for(p.m, row_grain(p.n * p.k), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          for (int64_t j = 0; j < p.n; ++j) {
            double sum = 0;
            for (int64_t q = 0; q < p.k; ++q) {
              sum += static_cast<double>(a[p.trans_a ? q * p.lda + i : i * p.lda + q]) *
                     static_cast<double>(b[p.trans_b ? j * p.ldb + q : q * p.ldb + j]);
            }
            sum *= g.alpha;
            if (g.has_c) {
              sum += g.beta * static_cast<double>(args.input<T>(2)[i * g.c_row + j * g.c_col]);
            }
            y[i * p.n + j] = static_cast<T>(static_cast<ComputeType<T>>(sum));
          }
        }
      });
    };
  });
}

// The sum may take the memory of C only where C is copied or is Y already, element for element.
Kernel gemm_kernel() { return {.name = "gemm", .make = make_gemm, .inplace = {{2, 0}}}; }

}  // namespace

void register_gemm(KernelRegistry& registry) {
  registry.add("Gemm", {gemm_kernel(), {.name = "ref", .make = make_ref, .inplace = {{2, 0}}}});
}

}  // namespace ortrain::cpu
