// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <numeric>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/gpu/strided_copy.h"
#include "ortrain/gpu/window_copy.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

// Elements put on in front of each axis (negative: taken off).
Dims front_pads(const NodeSpec& spec, size_t rank, size_t pads_input) {
  const std::optional<std::vector<int64_t>> pads = spec.constant_ints(pads_input);
  check(pads.has_value(), "pads are known when a kernel is made");
  std::vector<int64_t> axes(rank);
  std::iota(axes.begin(), axes.end(), 0);
  if (spec.has_input(3)) {
    const std::optional<std::vector<int64_t>> given = spec.constant_ints(3);
    check(given.has_value(), "axes are known when a kernel is made");
    axes = *given;
  }
  Dims front(rank, 0);
  for (size_t i = 0; i < axes.size(); ++i) {
    front[static_cast<size_t>(normalize_axis(axes[i], rank))] = (*pads)[i];
  }
  return front;
}

WindowCopy pad_copy(const NodeSpec& spec) {
  const Dims& from = spec.input(0).dims;
  const Dims& to = spec.output(0).dims;
  const Dims front = front_pads(spec, from.size(), 1);
  const Dims strides = strides_of(from);
  std::vector<WindowAxis> axes;
  for (size_t k = 0; k < from.size(); ++k) {
    axes.push_back({to[k], front[k], 1, from[k], strides[k]});
  }
  const Outside outside = outside_of(spec.attrs().string_("mode"));
  return WindowCopy(size_of(spec.input(0).dtype), std::move(axes), outside);
}

// --- the gradient of the modes that repeat elements

// An axis of dx: which places of dy are copies of each element, list after list.
struct GradientAxis {
  Divider extent;
  int64_t dy_stride = 1;
  const int32_t* starts = nullptr;  // extent + 1
  const int32_t* places = nullptr;
};
constexpr int kMostAxes = 12;
struct Gradient {
  int count = 0;
  GradientAxis axes[kMostAxes];
};

template <class T>
__global__ void __launch_bounds__(kItemThreads)
    pad_grad(Gradient gradient, int64_t count, const T* dy, T* dx) {
  using C = ComputeType<T>;
  for_each_item(count, [&](int64_t i) {
    // The lists of all axes form a box: its elements are added up in row-major order.
    int32_t begin[kMostAxes], size[kMostAxes];
    int64_t rest = i, terms = 1;
    for (int k = gradient.count - 1; k >= 0; --k) {
      const GradientAxis& axis = gradient.axes[k];
      const int64_t quotient = axis.extent.divide(rest);
      const int64_t at = rest - quotient * axis.extent.divisor;
      rest = quotient;
      begin[k] = axis.starts[at];
      size[k] = axis.starts[at + 1] - begin[k];
      terms *= size[k];
    }
    C sum = 0;
    for (int64_t t = 0; t < terms; ++t) {
      int64_t left = t, from = 0;
      for (int k = gradient.count - 1; k >= 0; --k) {
        const int64_t digit = left % size[k];
        left /= size[k];
        from += int64_t{gradient.axes[k].places[begin[k] + digit]} * gradient.axes[k].dy_stride;
      }
      sum += static_cast<C>(dy[from]);
    }
    dx[i] = static_cast<T>(sum);
  });
}

std::vector<int32_t> targets_of(int64_t extent, int64_t padded, int64_t front, Outside outside) {
  std::vector<std::vector<int32_t>> lists(static_cast<size_t>(extent));
  for (int64_t i = 0; i < padded; ++i) {
    lists[static_cast<size_t>(source_of(i - front, extent, outside))].push_back(
        static_cast<int32_t>(i));
  }
  std::vector<int32_t> table = {0};
  for (const auto& list : lists) table.push_back(table.back() + static_cast<int32_t>(list.size()));
  for (const auto& list : lists) table.insert(table.end(), list.begin(), list.end());
  return table;
}

std::optional<std::string> refuse_pad_grad(const NodeSpec& spec) {
  if (spec.output(0).dims.size() > static_cast<size_t>(kMostAxes)) {
    return str("more than ", kMostAxes, " axes");
  }
  for (int64_t extent : spec.input(0).dims) {
    if (needs_wide(extent)) return "an axis has 2^31 elements or more";
  }
  return std::nullopt;
}

KernelFn make_pad_grad(NodeSpec& spec, Device& device) {
  const Dims& dims = spec.output(0).dims;
  const std::string& mode = spec.attrs().string_("mode");
  if (mode == "constant") {
    throw UnsupportedError("the gradient of constant padding is Pad with negative pads");
  }
  const size_t size = size_of(spec.output(0).dtype);
  const int64_t count = spec.output(0).numel();
  if (spec.input(0).numel() == 0) {
    return [count, size](const KernelArgs& args) {
      fill_elements(args.out[0], count, size, 0, args.stream);
    };
  }
  const Dims front = front_pads(spec, dims.size(), 2);
  const Dims dy_strides = strides_of(spec.input(0).dims);
  std::vector<TensorData> tables;
  for (size_t k = 0; k < dims.size(); ++k) {
    std::vector<int32_t> table =
        targets_of(dims[k], spec.input(0).dims[k], front[k], outside_of(mode));
    tables.push_back(TensorData::from_values(DType::i32, {static_cast<int64_t>(table.size())},
                                             std::move(table)));
  }
  const PlacedConstants placed = place_constants(device, tables);
  Gradient gradient;
  for (size_t k = 0; k < dims.size(); ++k) {
    const auto* table = static_cast<const int32_t*>(placed.addresses[k]);
    gradient.axes[gradient.count++] = {Divider(dims[k]), dy_strides[k], table, table + dims[k] + 1};
  }
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [gradient, count, tables = placed.block](const KernelArgs& args) {
      launch(pad_grad<T>, items(count), args.stream, gradient, count, args.input<T>(0),
             args.output<T>(0));
    };
  });
}

}  // namespace

void register_pad(KernelRegistry& registry) {
  registry.add(
      "Pad", {{.name = "window",
               .why_not = [](const NodeSpec& spec) { return refusal_of([&] { pad_copy(spec); }); },
               .make = [](NodeSpec& spec) -> KernelFn {
                 return [copy = pad_copy(spec),
                         has_value = spec.has_input(2)](const KernelArgs& args) {
                   copy.run(args.in[0], args.out[0], has_value ? args.in[2] : nullptr, args.stream);
                 };
               }}});
  Device& device = registry.device();
  registry.add("ortrain::PadGrad",
               {{.name = "lists", .why_not = refuse_pad_grad, .make = [&device](NodeSpec& spec) {
                   return make_pad_grad(spec, device);
                 }}});
}

}  // namespace ortrain::gpu
