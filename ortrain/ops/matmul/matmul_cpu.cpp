// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <type_traits>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/gemm_any.h"
#include "ortrain/cpu/row_access.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/ops/matmul/matmul_problem.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

struct Config {
  ops::MatMulProblem problem;
  double alpha;
};

Config config_of(const NodeSpec& spec) {
  const bool is_fused = spec.node().op == "FusedMatMul";
  const AttributeReader attrs = spec.attrs();
  return {ops::MatMulProblem(spec.input(0).dims, spec.input(1).dims,
                             is_fused && attrs.int_("transA") != 0,
                             is_fused && attrs.int_("transB") != 0),
          is_fused ? attrs.float_("alpha") : 1.0};
}

// Products whose places are listed at a time, on the stack: many for each thread.
constexpr int64_t kMostListed = 1024;

KernelFn make_gemm(NodeSpec& spec) {
  return [config = config_of(spec), dtype = spec.input(0).dtype](const KernelArgs& args) {
    const ops::MatMulProblem& p = config.problem;
    std::array<int64_t, kMostListed> a, b, y;
    for (int64_t first = 0; first < p.count; first += kMostListed) {
      const int64_t count = std::min<int64_t>(kMostListed, p.count - first);
      for (int64_t i = 0; i < count; ++i) {
        const ops::MatMulProblem::Offsets offsets = p.offsets_of(first + i);
        const auto at = static_cast<size_t>(i);
        a[at] = offsets.a;
        b[at] = offsets.b;
        y[at] = offsets.y;
      }
      const GemmBatch batch{count, a.data(), b.data(), y.data()};
      gemm_any_batched(dtype, batch, p.trans_a, p.trans_b, p.m, p.n, p.k, config.alpha, args.in[0],
                       p.lda, args.in[1], p.ldb, 0.0, args.out[0], p.n);
    }
  };
}

// Sums in double for the float types, in the type itself for integers.
template <class T>
void multiply(const Config& config, const T* a, const T* b, T* y) {
  // Integers wrap, which signed ones must not do.
  using Sum = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>,
                                          std::type_identity<double>>::type;
  const ops::MatMulProblem& p = config.problem;
  parallel_for(p.count * p.m, row_grain(p.n * p.k), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const ops::MatMulProblem::Offsets offsets = p.offsets_of(row / p.m);
      const int64_t i = row % p.m;
      const T* left = a + offsets.a;
      const T* right = b + offsets.b;
      T* out = y + offsets.y + i * p.n;
      for (int64_t j = 0; j < p.n; ++j) {
        Sum sum = 0;
        for (int64_t q = 0; q < p.k; ++q) {
          sum += static_cast<Sum>(left[p.trans_a ? q * p.lda + i : i * p.lda + q]) *
                 static_cast<Sum>(right[p.trans_b ? j * p.ldb + q : q * p.ldb + j]);
        }
        if constexpr (std::is_integral_v<T>) {
          out[j] = static_cast<T>(sum);
        } else {
          out[j] = static_cast<T>(static_cast<ComputeType<T>>(config.alpha * sum));
        }
      }
    }
  });
}

template <class T>
KernelFn make_ref_of(NodeSpec& spec) {
  return [config = config_of(spec)](const KernelArgs& args) {
    multiply(config, args.input<T>(0), args.input<T>(1), args.output<T>(0));
  };
}

KernelFn make_ref(NodeSpec& spec) {
  switch (spec.input(0).dtype) {
    case DType::i32:
      return make_ref_of<int32_t>(spec);
    case DType::i64:
      return make_ref_of<int64_t>(spec);
    case DType::u32:
      return make_ref_of<uint32_t>(spec);
    case DType::u64:
      return make_ref_of<uint64_t>(spec);
    default:
      return dispatch_float(spec.input(0).dtype, [&](auto tag) {
        return make_ref_of<typename decltype(tag)::type>(spec);
      });
  }
}

}  // namespace

void register_matmul(KernelRegistry& registry) {
  const std::vector<Kernel> kernels = {{.name = "gemm", .types = kFloatTypes, .make = make_gemm},
                                       {.name = "ref", .make = make_ref}};
  registry.add("MatMul", kernels);
  registry.add("ortrain::FusedMatMul", kernels);
}

}  // namespace ortrain::cpu
