// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "ortrain/cpu/row_access.h"
#include "ortrain/cpu/simd/row_ops.h"
#include "ortrain/cpu/simd/vector_math.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

AxisSplit split_of(const NodeSpec& spec) {
  return AxisSplit(spec.input(0).dims, spec.attrs().int_("axis"));
}

template <class T>
using Compute = ComputeType<T>;

// --- the axis is the last one: a row at a time

template <class T>
void run_rows(const AxisSplit& split, bool log, const T* x, T* y) {
  const auto ops = row_ops<Compute<T>>();
  parallel_for(split.outer, row_grain(split.size), [&](int64_t begin, int64_t end) {
    RowAccess<T, 2> rows(split.size);
    for (int64_t i = begin; i < end; ++i) {
      T* out = y + i * split.size;
      (log ? ops.log_softmax : ops.softmax)(rows.read(0, x + i * split.size), rows.target(1, out),
                                            split.size);
      rows.write(1, out);
    }
  });
}

template <class T>
void run_grad_rows(const AxisSplit& split, bool log, const T* dy, const T* y, T* dx) {
  const auto ops = row_ops<Compute<T>>();
  parallel_for(split.outer, row_grain(split.size), [&](int64_t begin, int64_t end) {
    RowAccess<T, 3> rows(split.size);
    for (int64_t i = begin; i < end; ++i) {
      T* out = dx + i * split.size;
      (log ? ops.log_softmax_grad : ops.softmax_grad)(rows.read(0, dy + i * split.size),
                                                      rows.read(1, y + i * split.size),
                                                      rows.target(2, out), split.size);
      rows.write(2, out);
    }
  });
}

// --- another axis: a run of neighbouring columns at a time, all steps along the axis together

constexpr int64_t kColumns = 256;

template <class Fn>
void for_each_run(const AxisSplit& split, Fn fn) {
  const int64_t runs = (split.inner + kColumns - 1) / kColumns;
  parallel_for(split.outer * runs, row_grain(split.size * std::min(split.inner, kColumns)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t task = begin; task < end; ++task) {
                   const int64_t first = task % runs * kColumns;
                   fn(task / runs * split.size * split.inner + first,
                      std::min(kColumns, split.inner - first));
                 }
               });
}

template <class T>
void run_columns(const AxisSplit& split, bool log, const T* x, T* y) {
  for_each_run(split, [&](int64_t offset, int64_t n) {
    T max[kColumns], sum[kColumns], row[kColumns];
    std::fill(max, max + n, -std::numeric_limits<T>::infinity());
    std::fill(sum, sum + n, T{0});
    for (int64_t i = 0; i < split.size; ++i) {
      const T* in = x + offset + i * split.inner;
      for (int64_t c = 0; c < n; ++c) max[c] = max[c] < in[c] ? in[c] : max[c];
    }
    for (int64_t i = 0; i < split.size; ++i) {
      const T* in = x + offset + i * split.inner;
      T* out = y + offset + i * split.inner;
      for (int64_t c = 0; c < n; ++c) row[c] = in[c] - max[c];
      // Kept as the result: exp for softmax, the shifted value for its logarithm.
      if (log) std::copy_n(row, n, out);
      vector_exp(row, row, n);
      for (int64_t c = 0; c < n; ++c) sum[c] += row[c];
      if (!log) std::copy_n(row, n, out);
    }
    if (log) vector_log(sum, sum, n);
    for (int64_t i = 0; i < split.size; ++i) {
      T* out = y + offset + i * split.inner;
      if (log) {
        for (int64_t c = 0; c < n; ++c) out[c] -= sum[c];
      } else {
        for (int64_t c = 0; c < n; ++c) out[c] /= sum[c];
      }
    }
  });
}

template <class T>
void run_grad_columns(const AxisSplit& split, bool log, const T* dy, const T* y, T* dx) {
  for_each_run(split, [&](int64_t offset, int64_t n) {
    T sum[kColumns], row[kColumns];
    std::fill(sum, sum + n, T{0});
    for (int64_t i = 0; i < split.size; ++i) {
      const int64_t at = offset + i * split.inner;
      for (int64_t c = 0; c < n; ++c) sum[c] += log ? dy[at + c] : dy[at + c] * y[at + c];
    }
    for (int64_t i = 0; i < split.size; ++i) {
      const int64_t at = offset + i * split.inner;
      if (log) {
        vector_exp(y + at, row, n);
        for (int64_t c = 0; c < n; ++c) dx[at + c] = dy[at + c] - row[c] * sum[c];
      } else {
        for (int64_t c = 0; c < n; ++c) dx[at + c] = y[at + c] * (dy[at + c] - sum[c]);
      }
    }
  });
}

template <bool kLog>
KernelFn make_simd(NodeSpec& spec) {
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [split = split_of(spec)](const KernelArgs& args) {
      if constexpr (RowAccess<T, 1>::kDirect) {
        if (split.inner != 1) {
          run_columns(split, kLog, args.input<T>(0), args.output<T>(0));
          return;
        }
      }
      run_rows(split, kLog, args.input<T>(0), args.output<T>(0));
    };
  });
}

template <bool kLog>
KernelFn make_grad_simd(NodeSpec& spec) {
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [split = split_of(spec)](const KernelArgs& args) {
      if constexpr (RowAccess<T, 1>::kDirect) {
        if (split.inner != 1) {
          run_grad_columns(split, kLog, args.input<T>(0), args.input<T>(1), args.output<T>(0));
          return;
        }
      }
      run_grad_rows(split, kLog, args.input<T>(0), args.input<T>(1), args.output<T>(0));
    };
  });
}

std::optional<std::string> simd_why_not(const NodeSpec& spec) {
  const bool wide = kFullFloatTypes.contains(spec.input(0).dtype);
  if (!wide && split_of(spec).inner != 1) return "16-bit type along an axis that is not the last";
  return std::nullopt;
}

// --- ref: the formulas in double

template <class T>
T narrowed(double value) {
  return static_cast<T>(static_cast<Compute<T>>(value));
}

template <bool kLog>
KernelFn make_ref(NodeSpec& spec) {
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [split = split_of(spec)](const KernelArgs& args) {
      parallel_for(split.outer * split.inner, row_grain(split.size),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t lane = begin; lane < end; ++lane) {
                       const int64_t base =
                           lane / split.inner * split.size * split.inner + lane % split.inner;
                       const T* x = args.input<T>(0) + base;
                       T* y = args.output<T>(0) + base;
                       double max = -std::numeric_limits<double>::infinity();
                       for (int64_t i = 0; i < split.size; ++i) {
                         max = std::max(max, static_cast<double>(x[i * split.inner]));
                       }
                       double sum = 0;
                       for (int64_t i = 0; i < split.size; ++i) {
                         sum += std::exp(static_cast<double>(x[i * split.inner]) - max);
                       }
                       for (int64_t i = 0; i < split.size; ++i) {
                         const double shifted = static_cast<double>(x[i * split.inner]) - max;
                         y[i * split.inner] =
                             narrowed<T>(kLog ? shifted - std::log(sum) : std::exp(shifted) / sum);
                       }
                     }
                   });
    };
  });
}

template <bool kLog>
KernelFn make_grad_ref(NodeSpec& spec) {
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [split = split_of(spec)](const KernelArgs& args) {
      parallel_for(
          split.outer * split.inner, row_grain(split.size), [&](int64_t begin, int64_t end) {
            for (int64_t lane = begin; lane < end; ++lane) {
              const int64_t base =
                  lane / split.inner * split.size * split.inner + lane % split.inner;
              const T* dy = args.input<T>(0) + base;
              const T* y = args.input<T>(1) + base;
              T* dx = args.output<T>(0) + base;
              double sum = 0;
              for (int64_t i = 0; i < split.size; ++i) {
                const int64_t at = i * split.inner;
                sum += static_cast<double>(dy[at]) * (kLog ? 1.0 : static_cast<double>(y[at]));
              }
              for (int64_t i = 0; i < split.size; ++i) {
                const int64_t at = i * split.inner;
                const double g = static_cast<double>(dy[at]);
                const double v = static_cast<double>(y[at]);
                dx[at] = narrowed<T>(kLog ? g - std::exp(v) * sum : v * (g - sum));
              }
            }
          });
    };
  });
}

}  // namespace

void register_softmax(KernelRegistry& registry) {
  auto simd = [](auto make, std::vector<std::pair<int, int>> inplace) {
    return Kernel{.name = "simd", .why_not = simd_why_not, .make = make, .inplace = inplace};
  };
  registry.add("Softmax", {simd(make_simd<false>, {{0, 0}}),
                           {.name = "ref", .make = make_ref<false>, .inplace = {{0, 0}}}});
  registry.add("LogSoftmax", {simd(make_simd<true>, {{0, 0}}),
                              {.name = "ref", .make = make_ref<true>, .inplace = {{0, 0}}}});
  registry.add("ortrain::SoftmaxGrad",
               {simd(make_grad_simd<false>, {{0, 0}, {1, 0}}),
                {.name = "ref", .make = make_grad_ref<false>, .inplace = {{0, 0}, {1, 0}}}});
  registry.add("ortrain::LogSoftmaxGrad",
               {simd(make_grad_simd<true>, {{0, 0}, {1, 0}}),
                {.name = "ref", .make = make_grad_ref<true>, .inplace = {{0, 0}, {1, 0}}}});
}

}  // namespace ortrain::cpu
