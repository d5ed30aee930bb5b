// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/base/error.h"
#include "ortrain/cpu/threads.h"
#include "ortrain/ops/window/window.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

// The elements of the windows along one axis: begin, begin + step, ... below end; `count` is what
// an average divides by.
struct PoolAxis {
  int64_t in = 1;
  int64_t step = 1;
  std::vector<int64_t> begin, end, count;

  int64_t out() const { return static_cast<int64_t>(begin.size()); }
};

struct Pool {
  int64_t planes = 0;  // batch * channels
  std::array<PoolAxis, 3> axes;
  std::vector<ops::WindowAxis> windows;  // when they slide evenly

  int64_t in_size() const { return axes[0].in * axes[1].in * axes[2].in; }
  int64_t out_size() const { return axes[0].out() * axes[1].out() * axes[2].out(); }
};

// The tables of an axis are made while the plan is; longer ones would be gigabytes.
constexpr int64_t kMostOutputs = int64_t{1} << 26;

void check_outputs(int64_t out) {
  if (out > kMostOutputs) {
    throw UnsupportedError(
        str("pooling to an extent of ", out, "; up to ", kMostOutputs, " are supported"));
  }
}

std::span<const int64_t> spatial(const TensorSpec& spec) {
  return std::span<const int64_t>(spec.dims).subspan(2);
}

Pool windowed_pool(const AttributeReader& attrs, const TensorSpec& x, bool count_pads) {
  Pool pool;
  pool.planes = x.dims[0] * x.dims[1];
  const ops::Windows windows = ops::read_windows(attrs, x.dims.size() - 2, {});
  pool.windows = ops::concrete_windows(windows, spatial(x));
  for (size_t i = 0; i < 3; ++i) {
    const ops::WindowAxis& from = pool.windows[i];
    PoolAxis& to = pool.axes[i];
    to.in = from.in;
    to.step = from.dilation;
    check_outputs(from.out);
    for (int64_t o = 0; o < from.out; ++o) {
      const int64_t first = from.k_begin(o), last = std::max(first, from.k_end(o));
      to.begin.push_back(from.start(o) + first * from.dilation);
      to.end.push_back(to.begin.back() + (last - first) * from.dilation);
      // Windows of ceil_mode reach beyond the padding; that part never counts.
      const int64_t room = from.in + from.pad_end - from.start(o);
      const int64_t padded = std::min(from.kernel, (room + from.dilation - 1) / from.dilation);
      // The average of no element is 0.
      to.count.push_back(std::max<int64_t>(1, count_pads ? padded : last - first));
    }
  }
  return pool;
}

Pool adaptive_pool(const std::vector<int64_t>& size, const TensorSpec& x) {
  Pool pool;
  pool.planes = x.dims[0] * x.dims[1];
  const size_t skipped = 3 - size.size();
  for (size_t i = 0; i < 3; ++i) {
    PoolAxis& axis = pool.axes[i];
    const int64_t out = i < skipped ? 1 : size[i - skipped];
    axis.in = i < skipped ? 1 : x.dims[i - skipped + 2];
    check_outputs(out);
    for (int64_t o = 0; o < out; ++o) {
      const ops::AdaptiveWindow window(o, axis.in, out);
      axis.begin.push_back(window.begin);
      axis.end.push_back(window.end);
      axis.count.push_back(window.end - window.begin);
    }
  }
  return pool;
}

// One window over everything.
Pool global_pool(const TensorSpec& x) {
  Pool pool;
  pool.planes = x.dims[0] * x.dims[1];
  int64_t size = 1;
  for (int64_t extent : spatial(x)) size *= extent;
  for (PoolAxis& axis : pool.axes) {
    axis.in = &axis == &pool.axes[2] ? size : 1;
    axis.begin = {0};
    axis.end = axis.count = {axis.in};
  }
  return pool;
}

template <typename Body>
void for_each_plane(const Pool& pool, Body&& body) {
  const int64_t work = std::max<int64_t>(1, pool.in_size() + pool.out_size());
  parallel_for(pool.planes, std::max<int64_t>(1, 16384 / work), [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; ++plane) body(plane);
  });
}

// body(output index in the plane, d, h, w) for every window.
template <typename Body>
void for_each_window(const Pool& pool, Body&& body) {
  int64_t at = 0;
  for (int64_t d = 0; d < pool.axes[0].out(); ++d) {
    for (int64_t h = 0; h < pool.axes[1].out(); ++h) {
      for (int64_t w = 0; w < pool.axes[2].out(); ++w) body(at++, d, h, w);
    }
  }
}

// body(input index in the plane) for every element of a window, in memory order.
template <typename Body>
void for_each_element(const Pool& pool, int64_t d, int64_t h, int64_t w, Body&& body) {
  const PoolAxis &depth = pool.axes[0], &height = pool.axes[1], &width = pool.axes[2];
  const int64_t first = width.begin[w], last = width.end[w];
  for (int64_t i = depth.begin[d]; i < depth.end[d]; i += depth.step) {
    for (int64_t j = height.begin[h]; j < height.end[h]; j += height.step) {
      const int64_t row = (i * height.in + j) * width.in;
      for (int64_t k = first; k < last; k += width.step) body(row + k);
    }
  }
}

// Where the largest element of a window is; -1 when the window has none. As in PyTorch a NaN wins,
// otherwise the first of equal elements.
template <typename T>
int64_t find_max(const Pool& pool, const T* x, int64_t d, int64_t h, int64_t w) {
  using C = ComputeType<T>;
  C best = -std::numeric_limits<C>::infinity();
  int64_t place = -1;
  for_each_element(pool, d, h, w, [&](int64_t i) {
    const C value = static_cast<C>(x[i]);
    if (value > best || std::isnan(value) || place < 0) {
      best = value;
      place = i;
    }
  });
  return place;
}

// The outputs of one row that are searched together.
constexpr int64_t kRun = 64;

// find_max for outputs [first, first + count) of one row, kernel position by kernel position and
// without branches.
template <typename T>
void find_row_max(const Pool& pool, const T* x, int64_t d, int64_t h, int64_t first, int64_t count,
                  int32_t* places) {
  using C = ComputeType<T>;
  const ops::WindowAxis &depth = pool.windows[0], &height = pool.windows[1];
  const ops::WindowAxis& width = pool.windows[2];
  std::array<C, kRun> best;
  best.fill(-std::numeric_limits<C>::infinity());
  std::fill_n(places, count, -1);
  // The positions that some of these outputs find inside of the input.
  const int64_t kw_begin = width.k_begin(first + count - 1), kw_end = width.k_end(first);
  // Of more positions than elements, those in the padding, most are in no window.
  const int64_t kd_end = kw_end - kw_begin > width.in + count * width.stride ? 0 : depth.k_end(d);
  for (int64_t kd = depth.k_begin(d); kd < kd_end; ++kd) {
    for (int64_t kh = height.k_begin(h); kh < height.k_end(h); ++kh) {
      const int64_t row = ((depth.start(d) + kd * depth.dilation) * height.in + height.start(h) +
                           kh * height.dilation) *
                          width.in;
      for (int64_t kw = kw_begin; kw < kw_end; ++kw) {
        // Outputs whose element at kw lies inside of the row.
        const int64_t shift = kw * width.dilation - width.pad_begin, room = width.in - shift;
        const int64_t stride = width.stride;
        const int64_t low = shift >= 0 ? 0 : (stride - 1 - shift) / stride;
        const int64_t high = room <= 0 ? 0 : (room + stride - 1) / stride;
        const int64_t begin = std::max(low - first, int64_t{0});
        const int64_t end = std::min(high - first, count);
        const int64_t at = row + shift + first * stride;
        for (int64_t j = begin; j < end; ++j) {
          const C value = static_cast<C>(x[at + j * stride]);
          const bool wins = (value > best[static_cast<size_t>(j)]) | (value != value);
          best[static_cast<size_t>(j)] = wins ? value : best[static_cast<size_t>(j)];
          places[j] = wins ? static_cast<int32_t>(at + j * stride) : places[j];
        }
      }
    }
  }
  for (int64_t j = 0; j < count; ++j) {  // nothing above -infinity, or not searched
    if (places[j] < 0) places[j] = static_cast<int32_t>(find_max(pool, x, d, h, first + j));
  }
}

// body(output index in the plane, place of the largest element or -1) for every window.
template <typename T, typename Body>
void for_each_max(const Pool& pool, const T* x, Body&& body) {
  if (pool.windows.empty() || pool.in_size() > std::numeric_limits<int32_t>::max()) {
    for_each_window(pool, [&](int64_t at, int64_t d, int64_t h, int64_t w) {
      body(at, find_max(pool, x, d, h, w));
    });
    return;
  }
  std::array<int32_t, kRun> places;
  const int64_t width = pool.axes[2].out();
  int64_t at = 0;
  for (int64_t d = 0; d < pool.axes[0].out(); ++d) {
    for (int64_t h = 0; h < pool.axes[1].out(); ++h) {
      for (int64_t first = 0; first < width; first += kRun) {
        const int64_t count = std::min(kRun, width - first);
        find_row_max(pool, x, d, h, first, count, places.data());
        for (int64_t j = 0; j < count; ++j) body(at++, int64_t{places[static_cast<size_t>(j)]});
      }
    }
  }
}

template <typename T>
void max_pool(const Pool& pool, const T* x, T* y, int64_t* indices) {
  using C = ComputeType<T>;
  for_each_plane(pool, [&](int64_t plane) {
    const T* in = x + plane * pool.in_size();
    const int64_t first = plane * pool.out_size();
    for_each_max(pool, in, [&](int64_t at, int64_t place) {
      if (y) {
        y[first + at] = place < 0 ? static_cast<T>(-std::numeric_limits<C>::infinity()) : in[place];
      }
      if (indices) indices[first + at] = place < 0 ? -1 : plane * pool.in_size() + place;
    });
  });
}

// Sums contributions in the compute type: in dx itself, or in `sums` for 16-bit types.
template <typename T, typename Add>
void accumulate_planes(const Pool& pool, T* dx, ComputeType<T>* sums, Add&& add) {
  using C = ComputeType<T>;
  for_each_plane(pool, [&](int64_t plane) {
    const int64_t first = plane * pool.in_size();
    C* out;
    if constexpr (std::is_same_v<T, C>) {
      out = dx + first;
    } else {
      out = sums + first;
    }
    std::fill_n(out, pool.in_size(), C(0));
    add(plane, out);
    if constexpr (!std::is_same_v<T, C>) {
      for (int64_t i = 0; i < pool.in_size(); ++i) dx[first + i] = static_cast<T>(out[i]);
    }
  });
}

template <typename T>
void max_pool_grad(const Pool& pool, const T* dy, const T* x, T* dx, ComputeType<T>* sums) {
  accumulate_planes(pool, dx, sums, [&](int64_t plane, ComputeType<T>* out) {
    const T* in = x + plane * pool.in_size();
    const T* gradient = dy + plane * pool.out_size();
    for_each_max(pool, in, [&](int64_t at, int64_t place) {
      if (place >= 0) out[place] += static_cast<ComputeType<T>>(gradient[at]);
    });
  });
}

// In double: with padding the product may leave int64.
double divisor(const Pool& pool, int64_t d, int64_t h, int64_t w) {
  return static_cast<double>(pool.axes[0].count[d]) * static_cast<double>(pool.axes[1].count[h]) *
         static_cast<double>(pool.axes[2].count[w]);
}

template <typename T>
void average_pool(const Pool& pool, const T* x, T* y) {
  using C = ComputeType<T>;
  for_each_plane(pool, [&](int64_t plane) {
    const T* in = x + plane * pool.in_size();
    T* out = y + plane * pool.out_size();
    for_each_window(pool, [&](int64_t at, int64_t d, int64_t h, int64_t w) {
      // In double: the one window of a global average can be long.
      double sum = 0;
      for_each_element(pool, d, h, w, [&](int64_t i) { sum += static_cast<double>(in[i]); });
      out[at] = static_cast<T>(static_cast<C>(sum / divisor(pool, d, h, w)));
    });
  });
}

template <typename T>
void average_pool_grad(const Pool& pool, const T* dy, T* dx, ComputeType<T>* sums) {
  using C = ComputeType<T>;
  accumulate_planes(pool, dx, sums, [&](int64_t plane, C* out) {
    const T* gradient = dy + plane * pool.out_size();
    for_each_window(pool, [&](int64_t at, int64_t d, int64_t h, int64_t w) {
      const C share = static_cast<C>(gradient[at]) / static_cast<C>(divisor(pool, d, h, w));
      for_each_element(pool, d, h, w, [&](int64_t i) { out[i] += share; });
    });
  });
}

// Room for the sums of a gradient of 16-bit type.
template <typename T>
void request_sums(NodeSpec& spec) {
  if constexpr (!std::is_same_v<T, ComputeType<T>>) {
    spec.request_workspace(bytes_of<ComputeType<T>>(spec.output(0).numel()));
  }
}

using MakePool = Pool (*)(const NodeSpec&, const TensorSpec& x);

Pool max_windows(const NodeSpec& spec, const TensorSpec& x) {
  return windowed_pool(spec.attrs(), x, false);
}

Pool average_windows(const NodeSpec& spec, const TensorSpec& x) {
  return windowed_pool(spec.attrs(), x, spec.attrs().int_("count_include_pad") != 0);
}

Pool adaptive_windows(const NodeSpec& spec, const TensorSpec& x) {
  return adaptive_pool(spec.attrs().ints("output_size"), x);
}

Pool whole_planes(const NodeSpec&, const TensorSpec& x) { return global_pool(x); }

std::vector<Kernel> max_kernels(MakePool make_pool) {
  return {{.name = "ref", .make = [=](NodeSpec& spec) {
             return dispatch_float(spec.input(0).dtype, [&]<typename T>(TypeTag<T>) -> KernelFn {
               const bool values = spec.has_output(0), indices = spec.has_output(1);
               return [=, pool = make_pool(spec, spec.input(0))](const KernelArgs& args) {
                 max_pool(pool, args.input<T>(0), values ? args.output<T>(0) : nullptr,
                          indices ? args.output<int64_t>(1) : nullptr);
               };
             });
           }}};
}

std::vector<Kernel> max_grad_kernels(MakePool make_pool) {
  return {{.name = "ref", .make = [=](NodeSpec& spec) {
             return dispatch_float(spec.input(0).dtype, [&]<typename T>(TypeTag<T>) -> KernelFn {
               request_sums<T>(spec);
               return [pool = make_pool(spec, spec.input(1))](const KernelArgs& args) {
                 max_pool_grad(pool, args.input<T>(0), args.input<T>(1), args.output<T>(0),
                               static_cast<ComputeType<T>*>(args.workspace));
               };
             });
           }}};
}

std::vector<Kernel> average_kernels(MakePool make_pool) {
  return {{.name = "ref", .make = [=](NodeSpec& spec) {
             return dispatch_float(spec.input(0).dtype, [&]<typename T>(TypeTag<T>) -> KernelFn {
               return [pool = make_pool(spec, spec.input(0))](const KernelArgs& args) {
                 average_pool(pool, args.input<T>(0), args.output<T>(0));
               };
             });
           }}};
}

std::vector<Kernel> average_grad_kernels(MakePool make_pool) {
  return {{.name = "ref", .make = [=](NodeSpec& spec) {
             return dispatch_float(spec.input(0).dtype, [&]<typename T>(TypeTag<T>) -> KernelFn {
               request_sums<T>(spec);
               return [pool = make_pool(spec, spec.output(0))](const KernelArgs& args) {
                 average_pool_grad(pool, args.input<T>(0), args.output<T>(0),
                                   static_cast<ComputeType<T>*>(args.workspace));
               };
             });
           }}};
}

}  // namespace

void register_pool(KernelRegistry& registry) {
  registry.add("MaxPool", max_kernels(max_windows));
  registry.add("ortrain::MaxPoolGrad", max_grad_kernels(max_windows));
  registry.add("AveragePool", average_kernels(average_windows));
  registry.add("ortrain::AveragePoolGrad", average_grad_kernels(average_windows));
  registry.add("GlobalAveragePool", average_kernels(whole_planes));
  registry.add("ortrain::GlobalAveragePoolGrad", average_grad_kernels(whole_planes));
  registry.add("GlobalMaxPool", max_kernels(whole_planes));
  registry.add("ortrain::GlobalMaxPoolGrad", max_grad_kernels(whole_planes));
  registry.add("ortrain::AdaptiveAveragePool", average_kernels(adaptive_windows));
  registry.add("ortrain::AdaptiveAveragePoolGrad", average_grad_kernels(adaptive_windows));
}

}  // namespace ortrain::cpu
