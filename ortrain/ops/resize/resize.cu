// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <vector>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/base/narrow.h"
#include "ortrain/gpu/strided_copy.h"
#include "ortrain/ir/tensor_data.h"
#include "ortrain/ops/resize/resampling.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

// A pass as kernels see it: [outer, in, inner] becomes [outer, out, inner].
struct KernelPass {
  Divider inner, out;
  int64_t in = 0, count = 0;
  double outside = 0;              // for elements without taps
  const int32_t* begin = nullptr;  // there are few taps, the axis may be long
  const int64_t* indices = nullptr;
  const double* weights = nullptr;
};

template <class From, class To, class Index>
__global__ void __launch_bounds__(kItemThreads)
    resample(KernelPass pass, const From* from, To* to) {
  using C = ComputeType<To>;
  for_each_item(pass.count, [&](int64_t i) {
    const Index row = pass.inner.divide(static_cast<Index>(i));
    const Index outer = pass.out.divide(row);
    const int64_t at = static_cast<int64_t>(row) - static_cast<int64_t>(outer) * pass.out.divisor;
    const int64_t column = i - static_cast<int64_t>(row) * pass.inner.divisor;
    const int32_t first = pass.begin[at], last = pass.begin[at + 1];
    if (first == last) {
      to[i] = static_cast<To>(static_cast<C>(pass.outside));
      return;
    }
    const From* in = from + static_cast<int64_t>(outer) * pass.in * pass.inner.divisor + column;
    C sum = 0;
    for (int32_t t = first; t < last; ++t) {
      sum += static_cast<C>(pass.weights[t]) *
             static_cast<C>(in[pass.indices[t] * pass.inner.divisor]);
    }
    to[i] = static_cast<To>(sum);
  });
}

struct PlacedPasses {
  std::vector<KernelPass> passes;
  std::shared_ptr<Block> tables;
  int64_t elements = 0;  // without any pass
  int64_t largest = 0;
};

PlacedPasses place(const ops::Resampling& work, Device& device) {
  std::vector<TensorData> tables;
  for (const ops::Pass& pass : work.passes) {
    std::vector<int32_t> begin;
    std::vector<int64_t> indices;
    std::vector<double> weights;
    for (const size_t first : pass.axis.begin) {
      begin.push_back(narrow_checked<int32_t>(static_cast<int64_t>(first)));
    }
    for (const ops::ResizeTap& tap : pass.axis.taps) {
      indices.push_back(tap.index);
      weights.push_back(tap.weight);
    }
    const auto add = [&](DType dtype, const auto& values) {
      tables.push_back(
          TensorData::from_values(dtype, {static_cast<int64_t>(values.size())}, values));
    };
    add(DType::i32, begin);
    add(DType::i64, indices);
    add(DType::f64, weights);
  }
  const PlacedConstants placed = place_constants(device, tables);
  PlacedPasses result;
  result.tables = placed.block;
  result.elements = work.out;
  result.largest = work.largest;
  for (size_t i = 0; i < work.passes.size(); ++i) {
    const ops::Pass& pass = work.passes[i];
    result.passes.push_back({Divider(pass.inner), Divider(pass.axis.out), pass.axis.in,
                             pass.outer * pass.axis.out * pass.inner, work.outside,
                             static_cast<const int32_t*>(placed.addresses[3 * i]),
                             static_cast<const int64_t*>(placed.addresses[3 * i + 1]),
                             static_cast<const double*>(placed.addresses[3 * i + 2])});
  }
  return result;
}

template <class From, class To>
void run_pass(const KernelPass& pass, const From* from, To* to, void* stream) {
  dispatch_width(pass.count, [&](auto index) {
    launch(resample<From, To, decltype(index)>, items(pass.count), stream, pass, from, to);
  });
}

template <class T>
KernelFn make_passes(NodeSpec& spec, const ops::Resampling& resampling, Device& device) {
  using C = ComputeType<T>;
  PlacedPasses work = place(resampling, device);
  const size_t steps = work.passes.size();
  // Intermediates alternate between two buffers in the compute type.
  const int64_t buffer = steps > 1 ? (work.largest + 15) / 16 * 16 : 0;
  spec.request_workspace(bytes_of<C>(2, buffer));
  return [=, work = std::move(work)](const KernelArgs& args) {
    const T* x = args.input<T>(0);
    T* y = args.output<T>(0);
    C* buffers[] = {static_cast<C*>(args.workspace), static_cast<C*>(args.workspace) + buffer};
    if (steps == 0) {
      copy_bytes(x, y, work.elements * static_cast<int64_t>(sizeof(T)), args.stream);
    }
    for (size_t i = 0; i < steps; ++i) {
      const KernelPass& pass = work.passes[i];
      const C* before = buffers[(i + 1) % 2];
      C* after = buffers[i % 2];
      const bool last = i + 1 == steps;
      if (i == 0 && last) {
        run_pass(pass, x, y, args.stream);
      } else if (i == 0) {
        run_pass(pass, x, after, args.stream);
      } else if (last) {
        run_pass(pass, before, y, args.stream);
      } else {
        run_pass(pass, before, after, args.stream);
      }
    }
  };
}

KernelFn make_resize(NodeSpec& spec, Device& device) {
  // Without elements: an axis may still be longer than a table of it could be.
  if (spec.output(0).numel() == 0) return [](const KernelArgs&) {};
  return dispatch_float(spec.input(0).dtype, [&](auto tag) {
    return make_passes<typename decltype(tag)::type>(spec, ops::resampling_of(spec), device);
  });
}

KernelFn make_resize_grad(NodeSpec& spec, Device& device) {
  if (spec.input(0).numel() == 0) {
    return [count = spec.output(0).numel(), size = size_of(spec.output(0).dtype)](
               const KernelArgs& args) { fill_elements(args.out[0], count, size, 0, args.stream); };
  }
  return dispatch_float(spec.input(0).dtype, [&](auto tag) {
    return make_passes<typename decltype(tag)::type>(spec, ops::gradient_resampling_of(spec),
                                                     device);
  });
}

}  // namespace

void register_resize(KernelRegistry& registry) {
  Device& device = registry.device();
  registry.add("Resize", {{.name = "passes", .make = [&device](NodeSpec& spec) {
                             return make_resize(spec, device);
                           }}});
  registry.add("ortrain::ResizeGrad", {{.name = "passes", .make = [&device](NodeSpec& spec) {
                                          return make_resize_grad(spec, device);
                                        }}});
}

}  // namespace ortrain::gpu
