// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <utility>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/ops/resize/resize_axes.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

using ops::ResizeAxis;

std::optional<std::vector<double>> floats(const NodeSpec& spec, size_t index) {
  if (!spec.has_input(index) || spec.input(index).numel() == 0) return std::nullopt;
  const auto* values = static_cast<const float*>(spec.constant_input(index));
  if (values == nullptr)
    throw UnsupportedError(str(spec.context(), "input ", index, " must be a constant"));
  return std::vector<double>(values, values + spec.input(index).numel());
}

// The scales of a node whose tensors start at input `first`: given, or from an aspect ratio policy.
std::optional<std::vector<double>> scales_of(const NodeSpec& spec, const Dims& x, size_t first) {
  std::optional<std::vector<double>> given = floats(spec, first + 1);
  if (given) return given;
  const std::optional<std::vector<int64_t>> sizes = spec.constant_ints(first + 2);
  if (!sizes) throw UnsupportedError(str(spec.context(), "sizes must be known"));
  const std::vector<int64_t> axes = ops::resize_axes(spec.attrs(), x.size());
  const std::optional<double> scale = ops::aspect_scale(spec.attrs(), x, axes, *sizes);
  if (!scale) return std::nullopt;
  return std::vector<double>(axes.size(), *scale);
}

// One axis after the other, each as sums over [outer, extent, inner].
struct Pass {
  ResizeAxis axis;
  int64_t outer = 1;
  int64_t inner = 1;
};

struct Resampling {
  std::vector<Pass> passes;
  int64_t in = 0, out = 0;
  int64_t largest = 0;  // elements of the largest intermediate
  double outside = 0;   // for elements without taps
};

Resampling resampling(std::vector<ResizeAxis> axes, Dims dims, double outside) {
  Resampling result;
  result.in = num_elements(dims);
  result.outside = outside;
  for (ResizeAxis& axis : axes) {
    Pass pass;
    for (int64_t i = 0; i < axis.axis; ++i) pass.outer *= dims[static_cast<size_t>(i)];
    for (size_t i = static_cast<size_t>(axis.axis) + 1; i < dims.size(); ++i) pass.inner *= dims[i];
    dims[static_cast<size_t>(axis.axis)] = axis.out;
    pass.axis = std::move(axis);
    result.passes.push_back(std::move(pass));
    result.largest = std::max(result.largest, num_elements(dims));
  }
  result.out = num_elements(dims);
  return result;
}

template <typename From, typename To>
void run_pass(const Pass& pass, double outside, const From* from, To* to) {
  using C = ComputeType<To>;
  const ResizeAxis& axis = pass.axis;
  const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, pass.inner));
  parallel_for(pass.outer * axis.out, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const size_t o = static_cast<size_t>(row % axis.out);
      const From* in = from + row / axis.out * axis.in * pass.inner;
      To* out = to + row * pass.inner;
      const auto first = axis.taps.begin() + static_cast<std::ptrdiff_t>(axis.begin[o]);
      const auto last = axis.taps.begin() + static_cast<std::ptrdiff_t>(axis.begin[o + 1]);
      if (first == last) {
        std::fill_n(out, pass.inner, static_cast<To>(static_cast<C>(outside)));
        continue;
      }
      for (int64_t i = 0; i < pass.inner; ++i) {
        C sum = 0;
        for (auto tap = first; tap != last; ++tap) {
          sum += static_cast<C>(tap->weight) * static_cast<C>(in[tap->index * pass.inner + i]);
        }
        out[i] = static_cast<To>(sum);
      }
    }
  });
}

template <typename T>
KernelFn make_passes(NodeSpec& spec, Resampling work) {
  using C = ComputeType<T>;
  const size_t steps = work.passes.size();
  // Intermediates alternate between two buffers in the compute type.
  const int64_t buffer = steps > 1 ? (work.largest + 15) / 16 * 16 : 0;
  spec.request_workspace(static_cast<size_t>(2 * buffer) * sizeof(C));
  return [=, work = std::move(work)](const KernelArgs& args) {
    const T* x = args.input<T>(0);
    T* y = args.output<T>(0);
    C* buffers[] = {static_cast<C*>(args.workspace), static_cast<C*>(args.workspace) + buffer};
    if (steps == 0) std::copy_n(x, work.out, y);
    for (size_t i = 0; i < steps; ++i) {
      const Pass& pass = work.passes[i];
      const C* before = buffers[(i + 1) % 2];
      C* after = buffers[i % 2];
      if (i == 0 && steps == 1) {
        run_pass(pass, work.outside, x, y);
      } else if (i == 0) {
        run_pass(pass, work.outside, x, after);
      } else if (i + 1 == steps) {
        run_pass(pass, work.outside, before, y);
      } else {
        run_pass(pass, work.outside, before, after);
      }
    }
  };
}

template <typename T>
KernelFn make_resize(NodeSpec& spec) {
  const AttributeReader attrs = spec.attrs();
  const Dims &x = spec.input(0).dims, &y = spec.output(0).dims;
  // Without elements: an axis may still be longer than a table of it could be.
  if (num_elements(y) == 0) return [](const KernelArgs&) {};
  std::vector<ResizeAxis> axes =
      ops::resize_tables(attrs, x, y, scales_of(spec, x, 1), floats(spec, 1));
  return make_passes<T>(spec, resampling(std::move(axes), x, attrs.float_("extrapolation_value")));
}

template <typename T>
KernelFn make_resize_grad(NodeSpec& spec) {
  const Dims &x = spec.output(0).dims, &y = spec.input(0).dims;
  if (num_elements(y) == 0) {
    return [count = num_elements(x)](const KernelArgs& args) {
      std::fill_n(args.output<T>(0), count, T{});
    };
  }
  std::vector<ResizeAxis> axes =
      ops::resize_tables(spec.attrs(), x, y, scales_of(spec, x, 2), floats(spec, 2));
  for (ResizeAxis& axis : axes) axis = ops::transposed(axis);
  return make_passes<T>(spec, resampling(std::move(axes), y, 0));
}

}  // namespace

void register_resize(KernelRegistry& registry) {
  registry.add("Resize", {{.name = "ref", .make = [](NodeSpec& spec) {
                             return dispatch_float(
                                 spec.input(0).dtype,
                                 [&]<typename T>(TypeTag<T>) { return make_resize<T>(spec); });
                           }}});
  registry.add("ortrain::ResizeGrad", {{.name = "ref", .make = [](NodeSpec& spec) {
                                          return dispatch_float(spec.input(0).dtype,
                                                                [&]<typename T>(TypeTag<T>) {
                                                                  return make_resize_grad<T>(spec);
                                                                });
                                        }}});
}

}  // namespace ortrain::cpu
