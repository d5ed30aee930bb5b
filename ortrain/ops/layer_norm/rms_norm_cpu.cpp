// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "ortrain/cpu/row_access.h"
#include "ortrain/cpu/simd/row_ops.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/ops/layer_norm/row_blocks.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

using ops::NormRows;
using ops::RowBlocks;

template <class T>
using Compute = ComputeType<T>;

KernelFn make_simd(NodeSpec& spec) {
  const NormRows rows(spec.input(0).dims, spec.attrs().int_("axis"));
  const double epsilon = spec.attrs().float_("epsilon");
  const bool has_scale = spec.has_input(1);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    return [=](const KernelArgs& args) {
      const auto ops = row_ops<C>();
      const int64_t n = rows.size;
      parallel_for(rows.count, row_grain(n), [&](int64_t begin, int64_t end) {
        RowAccess<T, 3> access(n);
        const C* scale = has_scale ? access.read(0, args.input<T>(1)) : nullptr;
        for (int64_t i = begin; i < end; ++i) {
          T* y = args.output<T>(0) + i * n;
          C inv_rms;
          ops.rms_norm(access.read(1, args.input<T>(0) + i * n), scale, static_cast<C>(epsilon),
                       access.target(2, y), &inv_rms, n);
          access.write(2, y);
        }
      });
    };
  });
}

KernelFn make_ref(NodeSpec& spec) {
  const NormRows rows(spec.input(0).dims, spec.attrs().int_("axis"));
  const double epsilon = spec.attrs().float_("epsilon");
  const bool has_scale = spec.has_input(1);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [=](const KernelArgs& args) {
      const int64_t n = rows.size;
      for (int64_t i = 0; i < rows.count; ++i) {
        const T* x = args.input<T>(0) + i * n;
        double square = 0;
        for (int64_t j = 0; j < n; ++j)
          square += static_cast<double>(x[j]) * static_cast<double>(x[j]);
        const double r = 1.0 / std::sqrt(square / static_cast<double>(n) + epsilon);
        for (int64_t j = 0; j < n; ++j) {
          double value = static_cast<double>(x[j]) * r;
          if (has_scale) value *= static_cast<double>(args.input<T>(1)[j]);
          args.output<T>(0)[i * n + j] = static_cast<T>(static_cast<Compute<T>>(value));
        }
      }
    };
  });
}

// --- gradient: inputs dy, x, scale; outputs dx, dscale

KernelFn make_grad_simd(NodeSpec& spec) {
  const NormRows rows(spec.input(1).dims, spec.attrs().int_("axis"));
  const double epsilon = spec.attrs().float_("epsilon");
  const bool has_scale = spec.has_input(2);
  const bool has_dx = spec.has_output(0);
  const bool has_dscale = spec.has_output(1);
  const RowBlocks blocks(rows.count, rows.size);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    if (has_dscale) {
      spec.request_workspace(bytes_of<C>(blocks.count, rows.size));
    }
    return [=](const KernelArgs& args) {
      const auto ops = row_ops<C>();
      const int64_t n = rows.size;
      C* partial = static_cast<C*>(args.workspace);
      parallel_blocks(blocks.count, [&](int64_t block) {
        RowAccess<T, 4> access(n);
        const C* scale = has_scale ? access.read(0, args.input<T>(2)) : nullptr;
        C* dscale = has_dscale ? partial + block * n : nullptr;
        if (has_dscale) std::fill(dscale, dscale + n, C{0});
        for (int64_t i = blocks.begin(block); i < blocks.end(block); ++i) {
          const C* x = access.read(1, args.input<T>(1) + i * n);
          const C inv_rms =
              C{1} / std::sqrt(ops.dot(x, x, n) / static_cast<C>(n) + static_cast<C>(epsilon));
          T* dx = has_dx ? args.output<T>(0) + i * n : nullptr;
          ops.rms_norm_grad(access.read(2, args.input<T>(0) + i * n), x, scale, inv_rms,
                            has_dx ? access.target(3, dx) : nullptr, dscale, n);
          if (has_dx) access.write(3, dx);
        }
      });
      if (has_dscale) ops::sum_blocks(partial, blocks.count, n, n, args.output<T>(1));
    };
  });
}

KernelFn make_grad_ref(NodeSpec& spec) {
  const NormRows rows(spec.input(1).dims, spec.attrs().int_("axis"));
  const double epsilon = spec.attrs().float_("epsilon");
  const bool has_scale = spec.has_input(2);
  const bool has_dx = spec.has_output(0);
  const bool has_dscale = spec.has_output(1);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    spec.request_workspace(bytes_of<double>(rows.size));
    return [=](const KernelArgs& args) {
      const int64_t n = rows.size;
      double* dscale = static_cast<double*>(args.workspace);
      std::fill(dscale, dscale + n, 0.0);
      for (int64_t i = 0; i < rows.count; ++i) {
        const T* dy = args.input<T>(0) + i * n;
        const T* x = args.input<T>(1) + i * n;
        double square = 0;
        for (int64_t j = 0; j < n; ++j)
          square += static_cast<double>(x[j]) * static_cast<double>(x[j]);
        const double r = 1.0 / std::sqrt(square / static_cast<double>(n) + epsilon);
        auto g = [&](int64_t j) {
          return static_cast<double>(dy[j]) *
                 (has_scale ? static_cast<double>(args.input<T>(2)[j]) : 1.0);
        };
        double sum_gh = 0;
        for (int64_t j = 0; j < n; ++j) {
          const double h = static_cast<double>(x[j]) * r;
          sum_gh += g(j) * h;
          dscale[j] += static_cast<double>(dy[j]) * h;
        }
        if (!has_dx) continue;
        for (int64_t j = 0; j < n; ++j) {
          const double h = static_cast<double>(x[j]) * r;
          const double value = r * (g(j) - h * sum_gh / static_cast<double>(n));
          args.output<T>(0)[i * n + j] = static_cast<T>(static_cast<C>(value));
        }
      }
      for (int64_t j = 0; has_dscale && j < n; ++j) {
        args.output<T>(1)[j] = static_cast<T>(static_cast<C>(dscale[j]));
      }
    };
  });
}

}  // namespace

void register_rms_norm(KernelRegistry& registry) {
  registry.add("RMSNormalization", {{.name = "simd", .make = make_simd, .inplace = {{0, 0}}},
                                    {.name = "ref", .make = make_ref, .inplace = {{0, 0}}}});
  registry.add("ortrain::RMSNormalizationGrad",
               {{.name = "simd", .make = make_grad_simd, .inplace = {{0, 0}, {1, 0}}},
                {.name = "ref", .make = make_grad_ref}});
}

}  // namespace ortrain::cpu
