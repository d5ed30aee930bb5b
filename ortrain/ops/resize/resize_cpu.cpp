// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/ops/resize/resampling.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

using ops::Pass;
using ops::Resampling;
using ops::ResizeAxis;

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
  spec.request_workspace(bytes_of<C>(2, buffer));
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
  // Without elements: an axis may still be longer than a table of it could be.
  if (spec.output(0).numel() == 0) return [](const KernelArgs&) {};
  return make_passes<T>(spec, ops::resampling_of(spec));
}

template <typename T>
KernelFn make_resize_grad(NodeSpec& spec) {
  if (spec.input(0).numel() == 0) {
    return [count = spec.output(0).numel()](const KernelArgs& args) {
      std::fill_n(args.output<T>(0), count, T{});
    };
  }
  return make_passes<T>(spec, ops::gradient_resampling_of(spec));
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
