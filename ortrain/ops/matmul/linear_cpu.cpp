// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/gemm_any.h"
#include "ortrain/cpu/row_access.h"
#include "ortrain/cpu/storage.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

// Rows of x[..., K] as one matrix.
int64_t rows_of(const TensorSpec& x) {
  return num_elements(Dims(x.dims.begin(), x.dims.end() - 1));
}

KernelFn make_linear(NodeSpec& spec) {
  const int64_t m = rows_of(spec.input(0));
  const int64_t k = spec.input(0).dims.back();
  const int64_t n = spec.input(1).dims[0];
  const bool has_bias = spec.has_input(2);
  return [=, dtype = spec.input(0).dtype](const KernelArgs& args) {
    gemm_any(dtype, false, true, m, n, k, 1.0, args.in[0], k, args.in[1], k, 0.0, args.out[0], n,
             has_bias ? args.in[2] : nullptr);
  };
}

KernelFn make_linear_ref(NodeSpec& spec) {
  const int64_t m = rows_of(spec.input(0));
  const int64_t k = spec.input(0).dims.back();
  const int64_t n = spec.input(1).dims[0];
  const bool has_bias = spec.has_input(2);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [=](const KernelArgs& args) {
      const T* x = args.input<T>(0);
      const T* weight = args.input<T>(1);
      T* y = args.output<T>(0);
      parallel_for(m, row_grain(n * k), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          for (int64_t j = 0; j < n; ++j) {
            double sum = has_bias ? static_cast<double>(args.input<T>(2)[j]) : 0.0;
            for (int64_t q = 0; q < k; ++q) {
              sum += static_cast<double>(x[i * k + q]) * static_cast<double>(weight[j * k + q]);
            }
            y[i * n + j] = static_cast<T>(static_cast<ComputeType<T>>(sum));
          }
        }
      });
    };
  });
}

KernelFn make_input_grad(NodeSpec& spec) {
  const int64_t rows = rows_of(spec.input(0));
  const int64_t n = spec.input(1).dims[0];
  const int64_t k = spec.input(1).dims[1];
  const bool has_base = spec.has_input(2);
  const size_t bytes = spec.output(0).bytes();
  return [=, dtype = spec.input(0).dtype](const KernelArgs& args) {
    if (has_base && bytes != 0 && args.in[2] != args.out[0]) {
      std::memcpy(args.out[0], args.in[2], bytes);
    }
    gemm_any(dtype, false, false, rows, k, n, 1.0, args.in[0], n, args.in[1], k,
             has_base ? 1.0 : 0.0, args.out[0], k);
  };
}

KernelFn make_input_grad_ref(NodeSpec& spec) {
  const int64_t rows = rows_of(spec.input(0));
  const int64_t n = spec.input(1).dims[0];
  const int64_t k = spec.input(1).dims[1];
  const bool has_base = spec.has_input(2);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [=](const KernelArgs& args) {
      const T* dy = args.input<T>(0);
      const T* weight = args.input<T>(1);
      T* dx = args.output<T>(0);
      parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          for (int64_t q = 0; q < k; ++q) {
            double sum = has_base ? static_cast<double>(args.input<T>(2)[i * k + q]) : 0.0;
            for (int64_t j = 0; j < n; ++j) {
              sum += static_cast<double>(dy[i * n + j]) * static_cast<double>(weight[j * k + q]);
            }
            dx[i * k + q] = static_cast<T>(static_cast<ComputeType<T>>(sum));
          }
        }
      });
    };
  });
}

KernelFn make_weight_grad(NodeSpec& spec) {
  const int64_t rows = rows_of(spec.input(0));
  const int64_t n = spec.input(0).dims.back();
  const int64_t k = spec.input(1).dims.back();
  const bool has_base = spec.has_input(2);
  const size_t bytes = spec.output(0).bytes();
  return [=, dtype = spec.input(0).dtype](const KernelArgs& args) {
    if (has_base && bytes != 0 && args.in[2] != args.out[0]) {
      std::memcpy(args.out[0], args.in[2], bytes);
    }
    gemm_any(dtype, true, false, n, k, rows, 1.0, args.in[0], n, args.in[1], k,
             has_base ? 1.0 : 0.0, args.out[0], k);
  };
}

// Of 16-bit factors widened before.
KernelFn make_wide_weight_grad(NodeSpec& spec) {
  const int64_t rows = rows_of(spec.input(0));
  const int64_t n = spec.input(0).dims.back();
  const int64_t k = spec.input(1).dims.back();
  const DType type = spec.input(0).dtype;
  const bool widens = size_of(type) == 2;
  if (widens) spec.request_workspace(bytes_of<float>(rows, n + k));
  return [=](const KernelArgs& args) {
    const void* dy = args.in[0];
    const void* x = args.in[1];
    if (widens) {
      const Storage storage = storage_of(type);
      auto* const wide = static_cast<float*>(args.workspace);
      parallel_for(rows, row_grain(n + k), [&](int64_t begin, int64_t end) {
        widen(storage, static_cast<const uint16_t*>(args.in[0]) + begin * n, wide + begin * n,
              (end - begin) * n);
        widen(storage, static_cast<const uint16_t*>(args.in[1]) + begin * k,
              wide + rows * n + begin * k, (end - begin) * k);
      });
      dy = wide;
      x = wide + rows * n;
    }
    gemm_any(widens ? DType::f32 : type, true, false, n, k, rows, 1.0, dy, n, x, k, 0.0,
             args.out[0], k);
  };
}

template <typename T, typename Out>
KernelFn weight_grad_ref(NodeSpec& spec) {
  const int64_t rows = rows_of(spec.input(0));
  const int64_t n = spec.input(0).dims.back();
  const int64_t k = spec.input(1).dims.back();
  const bool has_base = spec.has_input(2);
  return [=](const KernelArgs& args) {
    const T* dy = args.input<T>(0);
    const T* x = args.input<T>(1);
    Out* dw = args.output<Out>(0);
    parallel_for(n, row_grain(rows * k), [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        for (int64_t q = 0; q < k; ++q) {
          double sum = has_base ? static_cast<double>(args.input<Out>(2)[j * k + q]) : 0.0;
          for (int64_t i = 0; i < rows; ++i) {
            sum += static_cast<double>(dy[i * n + j]) * static_cast<double>(x[i * k + q]);
          }
          dw[j * k + q] = static_cast<Out>(static_cast<ComputeType<Out>>(sum));
        }
      }
    });
  };
}

KernelFn make_weight_grad_ref(NodeSpec& spec) {
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return weight_grad_ref<T, T>(spec);
  });
}

KernelFn make_wide_weight_grad_ref(NodeSpec& spec) {
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return weight_grad_ref<T, ComputeType<T>>(spec);
  });
}

}  // namespace

void register_linear(KernelRegistry& registry) {
  registry.add("ortrain::Linear",
               {{.name = "gemm", .make = make_linear}, {.name = "ref", .make = make_linear_ref}});
  registry.add("ortrain::LinearInputGrad",
               {{.name = "gemm", .make = make_input_grad, .inplace = {{2, 0}}},
                {.name = "ref", .make = make_input_grad_ref, .inplace = {{2, 0}}}});
  registry.add("ortrain::LinearWeightGrad",
               {{.name = "gemm", .make = make_weight_grad, .inplace = {{2, 0}}},
                {.name = "ref", .make = make_weight_grad_ref, .inplace = {{2, 0}}}});
  registry.add("ortrain::WideLinearWeightGrad",
               {{.name = "gemm", .make = make_wide_weight_grad},
                {.name = "ref", .make = make_wide_weight_grad_ref}});
}

}  // namespace ortrain::cpu
