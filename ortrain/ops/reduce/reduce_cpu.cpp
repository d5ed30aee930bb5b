// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/odometer.h"
#include "ortrain/cpu/reduction.h"
#include "ortrain/cpu/simd/vector_math.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/ir/shape_inference.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

std::vector<bool> mark(const std::vector<int64_t>& axes, size_t rank) {
  std::vector<bool> marks(rank, false);
  for (int64_t axis : axes) marks[static_cast<size_t>(axis)] = true;
  return marks;
}

std::vector<bool> reduced_axes(const NodeSpec& spec) {
  const size_t rank = spec.input(0).dims.size();
  std::optional<std::vector<int64_t>> axes;
  if (spec.has_input(1)) {
    axes = spec.constant_ints(1);
    check(axes.has_value(), "axes are known when a kernel is made");
  }
  const bool none = !axes || axes->empty();
  if (none && spec.attrs().int_("noop_with_empty_axes") != 0) return std::vector<bool>(rank);
  return mark(normalize_axes_or_all(axes, rank), rank);
}

std::vector<Kernel> reduce_kernels(ReduceFormula formula) {
  std::vector<Kernel> kernels;
  if (formula.kind != ReduceKind::product) {
    kernels.push_back({.name = "blocked", .types = kFloatTypes, .make = [formula](NodeSpec& spec) {
                         return make_reduce_blocked(spec, formula, reduced_axes(spec));
                       }});
  }
  kernels.push_back({.name = "ref", .make = [formula](NodeSpec& spec) {
                       return make_reduce_ref(spec, formula, reduced_axes(spec));
                     }});
  return kernels;
}

// Where the elements that one output reduces lie: runs of a common length and stride.
struct ReducedRuns {
  Dims dims, strides;  // of the runs
  int64_t count = 1;
  int64_t length = 1;
  int64_t stride = 0;
};

ReducedRuns reduced_runs(const ReductionLayout& layout) {
  Odometer::check_rank(layout.reduced_dims.size());
  ReducedRuns runs{.dims = layout.reduced_dims, .strides = layout.reduced_strides};
  if (layout.count == 0) {
    runs.count = 0;
  } else if (!runs.dims.empty()) {
    runs.length = runs.dims.back();
    runs.stride = runs.strides.back();
    runs.count = layout.count / runs.length;
    runs.dims.pop_back();
    runs.strides.pop_back();
  }
  return runs;
}

// Where element `index`, in row-major order, lies.
int64_t offset_of(const Dims& dims, const Dims& strides, int64_t index) {
  int64_t offset = 0;
  for (size_t k = dims.size(); k-- > 0;) {
    offset += index % dims[k] * strides[k];
    index /= dims[k];
  }
  return offset;
}

int64_t output_offset(const ReductionLayout& layout, int64_t output) {
  return offset_of(layout.kept_dims, layout.kept_strides, output);
}

// body(offset of the first element) for each run.
template <typename Body>
void for_each_run(const ReducedRuns& runs, const Body& body) {
  if (runs.count == 0) return;
  Odometer run(runs.dims, runs.strides, 0);
  for (int64_t r = 0; r < runs.count; ++r, run.next()) body(run.offset());
}

constexpr int64_t kBuffer = 256;

template <typename T>
double widened(T value) {
  return static_cast<double>(static_cast<ComputeType<T>>(value));
}

// m + log(sum exp(x - m)) in double with m = max x; infinities as they are.
template <typename T>
double log_sum_exp(const T* x, const ReducedRuns& runs) {
  double most = -std::numeric_limits<double>::infinity();
  for_each_run(runs, [&](int64_t start) {
    for (int64_t i = 0; i < runs.length; ++i) {
      const double value = widened(x[start + i * runs.stride]);
      if (value > most || value != value) most = value;
    }
  });
  if (std::isinf(most) || std::isnan(most)) return most;
  double sum = 0;
  alignas(64) double buffer[kBuffer];
  for_each_run(runs, [&](int64_t start) {
    for (int64_t begin = 0; begin < runs.length; begin += kBuffer) {
      const int64_t n = std::min(kBuffer, runs.length - begin);
      for (int64_t i = 0; i < n; ++i) {
        buffer[i] = widened(x[start + (begin + i) * runs.stride]) - most;
      }
      vector_exp(buffer, buffer, n);
      for (int64_t i = 0; i < n; ++i) sum += buffer[i];
    }
  });
  return most + std::log(sum);
}

template <typename T>
T rounded(double value) {
  if constexpr (sizeof(T) == 2) {
    return T(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

// One output from the runs of its elements: value(address of the first, runs) in double, given as
// Out<T>.
template <template <typename> typename Out, typename Value>
KernelFn make_by_output(NodeSpec& spec, const Value& value) {
  ReductionLayout layout = reduction_layout(spec.input(0).dims, reduced_axes(spec));
  ReducedRuns runs = reduced_runs(layout);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [value, layout = std::move(layout), runs = std::move(runs)](const KernelArgs& args) {
      const T* in = args.input<T>(0);
      Out<T>* out = args.output<Out<T>>(0);
      parallel_for(layout.outputs, 2048 / std::max<int64_t>(layout.count, 1) + 1,
                   [&](int64_t begin, int64_t end) {
                     for (int64_t o = begin; o < end; ++o) {
                       out[o] = rounded<Out<T>>(value(in + output_offset(layout, o), runs));
                     }
                   });
    };
  });
}

KernelFn make_log_sum_exp(NodeSpec& spec) {
  return make_by_output<std::type_identity_t>(
      spec, [](const auto* x, const ReducedRuns& runs) { return log_sum_exp(x, runs); });
}

// Sums of 16-bit values as floats.
KernelFn make_wide_sum(NodeSpec& spec) {
  return make_by_output<ComputeType>(spec, [](const auto* x, const ReducedRuns& runs) {
    double sum = 0;
    for_each_run(runs, [&](int64_t start) {
      for (int64_t i = 0; i < runs.length; ++i) sum += widened(x[start + i * runs.stride]);
    });
    return sum;
  });
}

// Products of the elements before and after each one: exact with zeros, no division.
KernelFn make_prod_grad(NodeSpec& spec) {
  const Dims& dims = spec.input(1).dims;
  const std::vector<int64_t> axes = normalize_axes(spec.attrs().ints("axes"), dims.size());
  ReductionLayout layout = reduction_layout(dims, mark(axes, dims.size()));
  ReducedRuns runs = reduced_runs(layout);
  // Each block of outputs has a row of its own for the products of what follows.
  const int64_t blocks = std::clamp<int64_t>(layout.outputs, 1, 16);
  spec.request_workspace(bytes_of<double>(blocks, layout.count));
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [=, layout = std::move(layout), runs = std::move(runs)](const KernelArgs& args) {
      const T* dy = args.input<T>(0);
      parallel_blocks(blocks, [&](int64_t block) {
        double* after = static_cast<double*>(args.workspace) + block * layout.count;
        const int64_t end = (block + 1) * layout.outputs / blocks;
        for (int64_t o = block * layout.outputs / blocks; o < end; ++o) {
          const T* x = args.input<T>(1) + output_offset(layout, o);
          T* dx = args.output<T>(0) + output_offset(layout, o);
          const auto at = [&runs](int64_t i) {
            return offset_of(runs.dims, runs.strides, i / runs.length) +
                   i % runs.length * runs.stride;
          };
          double product = 1;
          for (int64_t i = layout.count; i-- > 0;) {
            after[i] = product;
            product *= widened(x[at(i)]);
          }
          product = widened(dy[o]);
          for (int64_t i = 0; i < layout.count; ++i) {
            const double value = widened(x[at(i)]);
            dx[at(i)] = rounded<T>(product * after[i]);
            product *= value;
          }
        }
      });
    };
  });
}

}  // namespace

void register_reduce(KernelRegistry& registry);
void register_reduce(KernelRegistry& registry) {
  using enum ReduceKind;
  const auto add = [&registry](const char* op, ReduceFormula formula) {
    registry.add(op, reduce_kernels(formula));
  };
  add("ReduceSum", {sum, ReduceFinish::none});
  add("ReduceMean", {sum, ReduceFinish::mean});
  add("ReduceMax", {maximum, ReduceFinish::none});
  add("ReduceMin", {minimum, ReduceFinish::none});
  add("ReduceProd", {product, ReduceFinish::none});
  add("ReduceL1", {sum_abs, ReduceFinish::none});
  add("ReduceL2", {sum_squares, ReduceFinish::sqrt});
  add("ReduceSumSquare", {sum_squares, ReduceFinish::none});
  add("ReduceLogSum", {sum, ReduceFinish::log});
  registry.add("ReduceLogSumExp", {{.name = "ref", .make = make_log_sum_exp}});
  registry.add("ortrain::WideReduceSum", {{.name = "ref", .make = make_wide_sum}});
  registry.add("ortrain::ReduceProdGrad", {{.name = "ref", .make = make_prod_grad}});
}

}  // namespace ortrain::cpu
