// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/base/error.h"
#include "ortrain/cpu/gemm.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

// Ends of the groups of rows, checked whenever they are read.
struct Groups {
  std::string context;
  DType dtype = DType::i64;
  int64_t count = 0;
  int64_t rows = 0;

  int64_t end(const KernelArgs& args, int64_t e) const {
    return dtype == DType::i64 ? args.input<int64_t>(2)[e] : args.input<int32_t>(2)[e];
  }
  int64_t begin(const KernelArgs& args, int64_t e) const { return e == 0 ? 0 : end(args, e - 1); }

  void check(const KernelArgs& args) const {
    int64_t last = 0;
    for (int64_t e = 0; e < count; ++e) {
      const int64_t next = end(args, e);
      if (next < last || next > rows) {
        throw IndexError(
            str(context, "offsets[", e, "] is ", next, "; it must be in [", last, ", ", rows, "]"));
      }
      last = next;
    }
  }
};

Groups groups_of(const NodeSpec& spec) {
  return {spec.context(), spec.input(2).dtype, spec.input(2).dims[0], spec.input(0).dims[0]};
}

// C[m, n] = op(A) * op(B) in the storage type T, sums in the compute type.
template <typename T>
void multiply(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, const T* a, int64_t lda,
              const T* b, int64_t ldb, T* c, int64_t ldc) {
  if constexpr (std::is_same_v<T, ComputeType<T>>) {
    gemm(trans_a, trans_b, m, n, k, T(1), a, lda, b, ldb, T(0), c, ldc);
  } else {
    constexpr Storage kStorage = std::is_same_v<T, BFloat16> ? Storage::kBF16 : Storage::kF16;
    gemm(kStorage, trans_a, trans_b, m, n, k, 1.0f, reinterpret_cast<const uint16_t*>(a), lda,
         reinterpret_cast<const uint16_t*>(b), ldb, 0.0f, reinterpret_cast<uint16_t*>(c), ldc);
  }
}

// Many small groups go to one thread each, few large ones are split inside of the product.
template <typename Body>
void for_each_group(const Groups& groups, Body&& body) {
  if (groups.count >= 2 * thread_count() && groups.rows < 256 * groups.count) {
    parallel_blocks(groups.count, body);
  } else {
    for (int64_t e = 0; e < groups.count; ++e) body(e);
  }
}

template <typename T>
KernelFn make_gemm(NodeSpec& spec) {
  const Groups groups = groups_of(spec);
  const int64_t depth = spec.input(0).dims[1], width = spec.output(0).dims[1];
  const bool transposed = spec.attrs().int_("trans_w") != 0;
  return [=](const KernelArgs& args) {
    groups.check(args);
    const T *x = args.input<T>(0), *w = args.input<T>(1);
    T* y = args.output<T>(0);
    for_each_group(groups, [&](int64_t e) {
      const int64_t begin = groups.begin(args, e), rows = groups.end(args, e) - begin;
      if (rows == 0) return;
      multiply(false, transposed, rows, width, depth, x + begin * depth, depth,
               w + e * depth * width, transposed ? depth : width, y + begin * width, width);
    });
    const int64_t done = groups.begin(args, groups.count);
    std::fill(y + done * width, y + groups.rows * width, T{});
  };
}

template <typename T>
KernelFn make_gemm_weight_grad(NodeSpec& spec) {
  const Groups groups = groups_of(spec);
  const int64_t depth = spec.input(0).dims[1], width = spec.input(1).dims[1];
  return [=](const KernelArgs& args) {
    groups.check(args);
    const T *x = args.input<T>(0), *dy = args.input<T>(1);
    T* dw = args.output<T>(0);
    for_each_group(groups, [&](int64_t e) {
      const int64_t begin = groups.begin(args, e), rows = groups.end(args, e) - begin;
      T* out = dw + e * depth * width;
      if (rows == 0) {
        std::fill_n(out, depth * width, T{});
      } else {
        multiply(true, false, depth, width, rows, x + begin * depth, depth, dy + begin * width,
                 width, out, width);
      }
    });
  };
}

template <typename T>
KernelFn make_ref(NodeSpec& spec) {
  const Groups groups = groups_of(spec);
  const int64_t depth = spec.input(0).dims[1], width = spec.output(0).dims[1];
  const bool transposed = spec.attrs().int_("trans_w") != 0;
  return [=](const KernelArgs& args) {
    groups.check(args);
    const T *x = args.input<T>(0), *w = args.input<T>(1);
    T* y = args.output<T>(0);
    int64_t e = 0;
    for (int64_t row = 0; row < groups.rows; ++row) {
      while (e < groups.count && row >= groups.end(args, e)) ++e;
      const T* weight = w + e * depth * width;
      for (int64_t j = 0; j < width; ++j) {
        double sum = 0;
        for (int64_t k = 0; e < groups.count && k < depth; ++k) {
          const T& factor = transposed ? weight[j * depth + k] : weight[k * width + j];
          sum += static_cast<double>(x[row * depth + k]) * static_cast<double>(factor);
        }
        y[row * width + j] = static_cast<T>(static_cast<ComputeType<T>>(sum));
      }
    }
  };
}

template <typename T>
KernelFn make_ref_weight_grad(NodeSpec& spec) {
  const Groups groups = groups_of(spec);
  const int64_t depth = spec.input(0).dims[1], width = spec.input(1).dims[1];
  return [=](const KernelArgs& args) {
    groups.check(args);
    const T *x = args.input<T>(0), *dy = args.input<T>(1);
    T* out = args.output<T>(0);
    for (int64_t e = 0; e < groups.count; ++e) {
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t j = 0; j < width; ++j) {
          double sum = 0;
          for (int64_t row = groups.begin(args, e); row < groups.end(args, e); ++row) {
            sum +=
                static_cast<double>(x[row * depth + k]) * static_cast<double>(dy[row * width + j]);
          }
          *out++ = static_cast<T>(static_cast<ComputeType<T>>(sum));
        }
      }
    }
  };
}

}  // namespace

void register_grouped_matmul(KernelRegistry& registry) {
  registry.add("ortrain::GroupedMatMul",
               {{.name = "gemm",
                 .make =
                     [](NodeSpec& spec) {
                       return dispatch_float(spec.input(0).dtype, [&]<typename T>(TypeTag<T>) {
                         return make_gemm<T>(spec);
                       });
                     }},
                {.name = "ref", .make = [](NodeSpec& spec) {
                   return dispatch_float(spec.input(0).dtype,
                                         [&]<typename T>(TypeTag<T>) { return make_ref<T>(spec); });
                 }}});
  registry.add("ortrain::GroupedMatMulWeightGrad",
               {{.name = "gemm",
                 .make =
                     [](NodeSpec& spec) {
                       return dispatch_float(spec.input(0).dtype, [&]<typename T>(TypeTag<T>) {
                         return make_gemm_weight_grad<T>(spec);
                       });
                     }},
                {.name = "ref", .make = [](NodeSpec& spec) {
                   return dispatch_float(spec.input(0).dtype, [&]<typename T>(TypeTag<T>) {
                     return make_ref_weight_grad<T>(spec);
                   });
                 }}});
}

}  // namespace ortrain::cpu
