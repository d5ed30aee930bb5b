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

struct Config {
  NormRows rows;
  double epsilon;
  bool has_scale, has_bias, has_mean, has_inv_std;
};

Config config_of(const NodeSpec& spec) {
  return {NormRows(spec.input(0).dims, spec.attrs().int_("axis")),
          spec.attrs().float_("epsilon"),
          spec.has_input(1),
          spec.has_input(2),
          spec.has_output(1),
          spec.has_output(2)};
}

KernelFn make_simd(NodeSpec& spec) {
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    return [c = config_of(spec)](const KernelArgs& args) {
      const auto ops = row_ops<C>();
      const int64_t n = c.rows.size;
      parallel_for(c.rows.count, row_grain(n), [&](int64_t begin, int64_t end) {
        RowAccess<T, 4> access(n);
        const C* scale = c.has_scale ? access.read(0, args.input<T>(1)) : nullptr;
        const C* bias = c.has_bias ? access.read(1, args.input<T>(2)) : nullptr;
        for (int64_t i = begin; i < end; ++i) {
          T* y = args.output<T>(0) + i * n;
          C mean, inv_std;
          ops.layer_norm(access.read(2, args.input<T>(0) + i * n), scale, bias,
                         static_cast<C>(c.epsilon), access.target(3, y), &mean, &inv_std, n);
          access.write(3, y);
          if (c.has_mean) args.output<C>(1)[i] = mean;
          if (c.has_inv_std) args.output<C>(2)[i] = inv_std;
        }
      });
    };
  });
}

KernelFn make_ref(NodeSpec& spec) {
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    return [c = config_of(spec)](const KernelArgs& args) {
      const int64_t n = c.rows.size;
      for (int64_t i = 0; i < c.rows.count; ++i) {
        const T* x = args.input<T>(0) + i * n;
        T* y = args.output<T>(0) + i * n;
        double mean = 0;
        for (int64_t j = 0; j < n; ++j) mean += static_cast<double>(x[j]);
        mean /= static_cast<double>(n);
        double variance = 0;
        for (int64_t j = 0; j < n; ++j) {
          const double centered = static_cast<double>(x[j]) - mean;
          variance += centered * centered;
        }
        const double inv_std = 1.0 / std::sqrt(variance / static_cast<double>(n) + c.epsilon);
        for (int64_t j = 0; j < n; ++j) {
          double value = (static_cast<double>(x[j]) - mean) * inv_std;
          if (c.has_scale) value *= static_cast<double>(args.input<T>(1)[j]);
          if (c.has_bias) value += static_cast<double>(args.input<T>(2)[j]);
          y[j] = static_cast<T>(static_cast<C>(value));
        }
        if (c.has_mean) args.output<C>(1)[i] = static_cast<C>(mean);
        if (c.has_inv_std) args.output<C>(2)[i] = static_cast<C>(inv_std);
      }
    };
  });
}

// --- gradient: inputs dy, x, mean, inv_std, scale; outputs dx, dscale, dbias

KernelFn make_grad_simd(NodeSpec& spec) {
  const NormRows rows(spec.input(1).dims, spec.attrs().int_("axis"));
  const bool has_scale = spec.has_input(4);
  const bool has_dx = spec.has_output(0);
  const bool has_dscale = spec.has_output(1);
  const bool has_dbias = spec.has_output(2);
  const int64_t sums = (has_dscale ? 1 : 0) + (has_dbias ? 1 : 0);
  const RowBlocks blocks(rows.count, sums == 0 ? 0 : rows.size);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    spec.request_workspace(bytes_of<C>(blocks.count, sums, rows.size));
    return [=](const KernelArgs& args) {
      const auto ops = row_ops<C>();
      const int64_t n = rows.size;
      C* partial = static_cast<C*>(args.workspace);
      parallel_blocks(blocks.count, [&](int64_t block) {
        RowAccess<T, 4> access(n);
        const C* scale = has_scale ? access.read(0, args.input<T>(4)) : nullptr;
        C* own = partial + block * sums * n;
        std::fill(own, own + sums * n, C{0});
        C* dscale = has_dscale ? own : nullptr;
        C* dbias = has_dbias ? own + (has_dscale ? n : 0) : nullptr;
        for (int64_t i = blocks.begin(block); i < blocks.end(block); ++i) {
          T* dx = has_dx ? args.output<T>(0) + i * n : nullptr;
          ops.layer_norm_grad(access.read(1, args.input<T>(0) + i * n),
                              access.read(2, args.input<T>(1) + i * n), scale, args.input<C>(2)[i],
                              args.input<C>(3)[i], has_dx ? access.target(3, dx) : nullptr, dscale,
                              dbias, n);
          if (has_dx) access.write(3, dx);
        }
      });
      int64_t at = 0;
      for (const size_t output : {size_t{1}, size_t{2}}) {
        if (output == 1 ? !has_dscale : !has_dbias) continue;
        ops::sum_blocks(partial + at * n, blocks.count, sums * n, n, args.output<T>(output));
        ++at;
      }
    };
  });
}

KernelFn make_grad_ref(NodeSpec& spec) {
  const NormRows rows(spec.input(1).dims, spec.attrs().int_("axis"));
  const bool has_scale = spec.has_input(4);
  const bool has_dx = spec.has_output(0);
  const bool has_dscale = spec.has_output(1);
  const bool has_dbias = spec.has_output(2);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    spec.request_workspace(bytes_of<double>(2, rows.size));
    return [=](const KernelArgs& args) {
      const int64_t n = rows.size;
      double* dscale = static_cast<double*>(args.workspace);
      double* dbias = dscale + n;
      std::fill(dscale, dscale + 2 * n, 0.0);
      for (int64_t i = 0; i < rows.count; ++i) {
        const T* dy = args.input<T>(0) + i * n;
        const T* x = args.input<T>(1) + i * n;
        const double mean = args.input<C>(2)[i];
        const double inv_std = args.input<C>(3)[i];
        double sum_g = 0;
        double sum_gh = 0;
        auto h = [&](int64_t j) { return (static_cast<double>(x[j]) - mean) * inv_std; };
        auto g = [&](int64_t j) {
          return static_cast<double>(dy[j]) *
                 (has_scale ? static_cast<double>(args.input<T>(4)[j]) : 1.0);
        };
        for (int64_t j = 0; j < n; ++j) {
          sum_g += g(j);
          sum_gh += g(j) * h(j);
          dscale[j] += static_cast<double>(dy[j]) * h(j);
          dbias[j] += static_cast<double>(dy[j]);
        }
        if (!has_dx) continue;
        const double count = static_cast<double>(n);
        for (int64_t j = 0; j < n; ++j) {
          const double value = inv_std * (g(j) - sum_g / count - h(j) * sum_gh / count);
          args.output<T>(0)[i * n + j] = static_cast<T>(static_cast<C>(value));
        }
      }
      for (int64_t j = 0; j < n; ++j) {
        if (has_dscale) args.output<T>(1)[j] = static_cast<T>(static_cast<C>(dscale[j]));
        if (has_dbias) args.output<T>(2)[j] = static_cast<T>(static_cast<C>(dbias[j]));
      }
    };
  });
}

}  // namespace

void register_layer_norm(KernelRegistry& registry) {
  registry.add("LayerNormalization", {{.name = "simd", .make = make_simd, .inplace = {{0, 0}}},
                                      {.name = "ref", .make = make_ref, .inplace = {{0, 0}}}});
  registry.add("ortrain::LayerNormalizationGrad",
               {{.name = "simd", .make = make_grad_simd, .inplace = {{0, 0}, {1, 0}}},
                {.name = "ref", .make = make_grad_ref}});
}

}  // namespace ortrain::cpu
