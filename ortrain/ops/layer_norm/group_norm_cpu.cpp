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

template <class T>
using Compute = ComputeType<T>;

// x as [batch, groups, channels per group, space]; one group is one contiguous row.
struct Config {
  int64_t batch, groups, per_group, space;
  double epsilon;

  Config(const NodeSpec& spec, size_t x)
      : batch(spec.input(x).dims[0]),
        groups(spec.attrs().int_("num_groups")),
        per_group(spec.input(x).dims[1] / groups),
        space(num_elements(Dims(spec.input(x).dims.begin() + 2, spec.input(x).dims.end()))),
        epsilon(spec.attrs().float_("epsilon")) {}

  int64_t rows() const { return batch * groups; }
  int64_t row_size() const { return per_group * space; }
  int64_t channels() const { return groups * per_group; }
  // The first channel of a row.
  int64_t channel(int64_t row) const { return row % groups * per_group; }
};

KernelFn make_simd(NodeSpec& spec) {
  const bool has_scale = spec.has_input(1);
  const bool has_bias = spec.has_input(2);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    return [c = Config(spec, 0), has_scale, has_bias](const KernelArgs& args) {
      const auto ops = row_ops<C>();
      const int64_t n = c.row_size();
      parallel_for(c.rows(), row_grain(n), [&](int64_t begin, int64_t end) {
        RowAccess<T, 2> access(n);
        for (int64_t row = begin; row < end; ++row) {
          T* out = args.output<T>(0) + row * n;
          C* y = access.target(1, out);
          C mean, inv_std;
          ops.layer_norm(access.read(0, args.input<T>(0) + row * n), nullptr, nullptr,
                         static_cast<C>(c.epsilon), y, &mean, &inv_std, n);
          for (int64_t k = 0; k < c.per_group && (has_scale || has_bias); ++k) {
            const int64_t channel = c.channel(row) + k;
            const C scale = has_scale ? C(args.input<T>(1)[channel]) : C{1};
            const C bias = has_bias ? C(args.input<T>(2)[channel]) : C{0};
            C* values = y + k * c.space;
            for (int64_t j = 0; j < c.space; ++j) values[j] = values[j] * scale + bias;
          }
          access.write(1, out);
        }
      });
    };
  });
}

struct Statistics {
  double mean, inv_std;
};

template <class T>
Statistics statistics_of(const T* x, int64_t n, double epsilon) {
  double mean = 0;
  for (int64_t j = 0; j < n; ++j) mean += static_cast<double>(x[j]);
  mean /= static_cast<double>(n);
  double variance = 0;
  for (int64_t j = 0; j < n; ++j) {
    const double centered = static_cast<double>(x[j]) - mean;
    variance += centered * centered;
  }
  return {mean, 1.0 / std::sqrt(variance / static_cast<double>(n) + epsilon)};
}

KernelFn make_ref(NodeSpec& spec) {
  const bool has_scale = spec.has_input(1);
  const bool has_bias = spec.has_input(2);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [c = Config(spec, 0), has_scale, has_bias](const KernelArgs& args) {
      const int64_t n = c.row_size();
      for (int64_t row = 0; row < c.rows(); ++row) {
        const T* x = args.input<T>(0) + row * n;
        const Statistics s = statistics_of(x, n, c.epsilon);
        for (int64_t j = 0; j < n; ++j) {
          const int64_t channel = c.channel(row) + j / c.space;
          double value = (static_cast<double>(x[j]) - s.mean) * s.inv_std;
          if (has_scale) value *= static_cast<double>(args.input<T>(1)[channel]);
          if (has_bias) value += static_cast<double>(args.input<T>(2)[channel]);
          args.output<T>(0)[row * n + j] = static_cast<T>(static_cast<Compute<T>>(value));
        }
      }
    };
  });
}

// --- gradient: inputs dy, x, scale; outputs dx, dscale, dbias

KernelFn make_grad_simd(NodeSpec& spec) {
  const Config c(spec, 1);
  const bool has_scale = spec.has_input(2);
  const bool has_dx = spec.has_output(0);
  const bool has_dscale = spec.has_output(1);
  const bool has_dbias = spec.has_output(2);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    // Per batch entry and channel: sum(dy h) and sum(dy).
    spec.request_workspace(bytes_of<C>(2, c.batch, c.channels()));
    return [=](const KernelArgs& args) {
      const auto ops = row_ops<C>();
      const int64_t n = c.row_size();
      C* products = static_cast<C*>(args.workspace);
      C* sums = products + c.batch * c.channels();
      parallel_for(c.rows(), row_grain(n), [&](int64_t begin, int64_t end) {
        RowAccess<T, 3> access(n);
        C* h = scratch<C>(ScratchSlot::kKernel, n);
        for (int64_t row = begin; row < end; ++row) {
          const C* dy = access.read(0, args.input<T>(0) + row * n);
          C mean, inv_std;
          ops.layer_norm(access.read(1, args.input<T>(1) + row * n), nullptr, nullptr,
                         static_cast<C>(c.epsilon), h, &mean, &inv_std, n);
          C sum_g{0};
          C sum_gh{0};
          for (int64_t k = 0; k < c.per_group; ++k) {
            const int64_t at = row / c.groups * c.channels() + c.channel(row) + k;
            const C scale = has_scale ? C(args.input<T>(2)[c.channel(row) + k]) : C{1};
            products[at] = ops.dot(dy + k * c.space, h + k * c.space, c.space);
            sums[at] = ops.sum(dy + k * c.space, c.space);
            sum_g += scale * sums[at];
            sum_gh += scale * products[at];
          }
          if (!has_dx) continue;
          T* out = args.output<T>(0) + row * n;
          C* dx = access.target(2, out);
          const C mean_g = sum_g / static_cast<C>(n);
          const C mean_gh = sum_gh / static_cast<C>(n);
          for (int64_t k = 0; k < c.per_group; ++k) {
            const C scale = has_scale ? C(args.input<T>(2)[c.channel(row) + k]) : C{1};
            for (int64_t j = k * c.space; j < (k + 1) * c.space; ++j) {
              dx[j] = inv_std * (dy[j] * scale - mean_g - h[j] * mean_gh);
            }
          }
          access.write(2, out);
        }
      });
      auto over_batch = [&](const C* partial, T* out) {
        if (c.batch == 0) {
          std::fill(out, out + c.channels(), T(C{0}));
        } else {
          ops::sum_blocks(partial, c.batch, c.channels(), c.channels(), out);
        }
      };
      if (has_dscale) over_batch(products, args.output<T>(1));
      if (has_dbias) over_batch(sums, args.output<T>(2));
    };
  });
}

KernelFn make_grad_ref(NodeSpec& spec) {
  const Config c(spec, 1);
  const bool has_scale = spec.has_input(2);
  const bool has_dx = spec.has_output(0);
  const bool has_dscale = spec.has_output(1);
  const bool has_dbias = spec.has_output(2);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    spec.request_workspace(bytes_of<double>(2, c.channels()));
    return [=](const KernelArgs& args) {
      const int64_t n = c.row_size();
      double* dscale = static_cast<double*>(args.workspace);
      double* dbias = dscale + c.channels();
      std::fill(dscale, dscale + 2 * c.channels(), 0.0);
      for (int64_t row = 0; row < c.rows(); ++row) {
        const T* dy = args.input<T>(0) + row * n;
        const T* x = args.input<T>(1) + row * n;
        const Statistics s = statistics_of(x, n, c.epsilon);
        auto h = [&](int64_t j) { return (static_cast<double>(x[j]) - s.mean) * s.inv_std; };
        auto g = [&](int64_t j) {
          const int64_t channel = c.channel(row) + j / c.space;
          return static_cast<double>(dy[j]) *
                 (has_scale ? static_cast<double>(args.input<T>(2)[channel]) : 1.0);
        };
        double sum_g = 0;
        double sum_gh = 0;
        for (int64_t j = 0; j < n; ++j) {
          const int64_t channel = c.channel(row) + j / c.space;
          sum_g += g(j);
          sum_gh += g(j) * h(j);
          dscale[channel] += static_cast<double>(dy[j]) * h(j);
          dbias[channel] += static_cast<double>(dy[j]);
        }
        if (!has_dx) continue;
        const double count = static_cast<double>(n);
        for (int64_t j = 0; j < n; ++j) {
          const double value = s.inv_std * (g(j) - sum_g / count - h(j) * sum_gh / count);
          args.output<T>(0)[row * n + j] = static_cast<T>(static_cast<C>(value));
        }
      }
      for (int64_t j = 0; j < c.channels(); ++j) {
        if (has_dscale) args.output<T>(1)[j] = static_cast<T>(static_cast<C>(dscale[j]));
        if (has_dbias) args.output<T>(2)[j] = static_cast<T>(static_cast<C>(dbias[j]));
      }
    };
  });
}

}  // namespace

void register_group_norm(KernelRegistry& registry) {
  registry.add("GroupNormalization", {{.name = "simd", .make = make_simd, .inplace = {{0, 0}}},
                                      {.name = "ref", .make = make_ref, .inplace = {{0, 0}}}});
  registry.add("ortrain::GroupNormalizationGrad",
               {{.name = "simd", .make = make_grad_simd, .inplace = {{0, 0}, {1, 0}}},
                {.name = "ref", .make = make_grad_ref}});
}

}  // namespace ortrain::cpu
