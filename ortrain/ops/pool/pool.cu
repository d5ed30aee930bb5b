// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <limits>

#include "ortrain/base/narrow.h"
#include "ortrain/gpu/row_forms.h"
#include "ortrain/ops/window/window.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

constexpr int kAxes = 3;

template <class I>
ORTRAIN_HOST_DEVICE constexpr I ceil_div(I a, I b) {
  return (a + b - 1) / b;
}

// Windows along one axis: sliding ones (see WindowAxis), or with stride 0 those of adaptive
// pooling, which share the axis out evenly. I: int32_t where all of it fits (see `narrowed`), since
// elements find their windows by divisions.
template <class I>
struct PoolAxis {
  I in = 1, out = 1, kernel = 1, stride = 1, dilation = 1, pad_begin = 0, pad_end = 0;

  ORTRAIN_DEVICE bool adaptive() const { return stride == 0; }
  ORTRAIN_DEVICE I start(I o) const { return o * stride - pad_begin; }
  // The first element of window o, and what lies behind the last one; in steps of `dilation`.
  ORTRAIN_DEVICE I begin(I o) const {
    if (adaptive()) return o * in / out;
    const I first = start(o);
    return first >= 0 ? first : first + ceil_div(-first, dilation) * dilation;
  }
  ORTRAIN_DEVICE I end(I o) const {
    if (adaptive()) return ceil_div((o + 1) * in, out);
    const I last = start(o) + (kernel - 1) * dilation + 1;
    return last < in ? last : in;
  }
  // What an average divides by. Windows of ceil_mode reach beyond the padding; that never counts.
  ORTRAIN_DEVICE I count(I o, bool count_pads) const {
    I elements = 0;
    if (count_pads && !adaptive()) {
      elements = ceil_div(in + pad_end - start(o), dilation);
      if (elements > kernel) elements = kernel;
    } else {
      elements = ceil_div(end(o) - begin(o), dilation);
    }
    return elements > 1 ? elements : 1;
  }
  // The windows [first, last] that may hold element i.
  ORTRAIN_DEVICE I first_window(I i) const {
    if (adaptive()) return i * out / in;
    const I from = i + pad_begin - (kernel - 1) * dilation;
    return from <= 0 ? 0 : ceil_div(from, stride);
  }
  ORTRAIN_DEVICE I last_window(I i) const {
    const I last = adaptive() ? ceil_div((i + 1) * out, in) - 1 : (i + pad_begin) / stride;
    return last < out ? last : out - 1;
  }
  ORTRAIN_DEVICE bool holds(I o, I i) const {
    if (i < begin(o) || i >= end(o)) return false;
    return adaptive() || dilation == 1 || (i - start(o)) % dilation == 0;
  }
};

template <class I>
struct Pool {
  I planes = 0;
  bool count_pads = false;
  DeviceArray<PoolAxis<I>, kAxes> axes;

  ORTRAIN_HOST_DEVICE I in_size() const { return axes[0].in * axes[1].in * axes[2].in; }
  ORTRAIN_HOST_DEVICE I out_size() const { return axes[0].out * axes[1].out * axes[2].out; }

  // body(element of the plane) for each of window `at`, in memory order: those whose number is
  // `first` more than a multiple of `step`.
  template <class Body>
  ORTRAIN_DEVICE void for_each_element(I at, I first, I step, const Body& body) const {
    const I w = at % axes[2].out, h = at / axes[2].out % axes[1].out;
    const I d = at / axes[2].out / axes[1].out;
    I number = first;
    I passed = 0;
    const I width_begin = axes[2].begin(w), width_end = axes[2].end(w);
    const I width =
        width_end <= width_begin ? 0 : ceil_div(width_end - width_begin, axes[2].dilation);
    for (I i = axes[0].begin(d); i < axes[0].end(d); i += axes[0].dilation) {
      for (I j = axes[1].begin(h); j < axes[1].end(h); j += axes[1].dilation) {
        const I row = (i * axes[1].in + j) * axes[2].in + width_begin;
        for (; number < passed + width; number += step) {
          body(row + (number - passed) * axes[2].dilation);
        }
        passed += width;
      }
    }
  }
  // Counts of padding may multiply to more than int64 has.
  ORTRAIN_DEVICE double divisor(I at) const {
    return static_cast<double>(axes[2].count(at % axes[2].out, count_pads)) *
           static_cast<double>(axes[1].count(at / axes[2].out % axes[1].out, count_pads)) *
           static_cast<double>(axes[0].count(at / axes[2].out / axes[1].out, count_pads));
  }
  // body(window of the plane) for each that holds element `at`, in order.
  template <class Body>
  ORTRAIN_DEVICE void for_each_window(I at, const Body& body) const {
    const I w = at % axes[2].in, h = at / axes[2].in % axes[1].in;
    const I d = at / axes[2].in / axes[1].in;
    for (I i = axes[0].first_window(d); i <= axes[0].last_window(d); ++i) {
      if (!axes[0].holds(i, d)) continue;
      for (I j = axes[1].first_window(h); j <= axes[1].last_window(h); ++j) {
        if (!axes[1].holds(j, h)) continue;
        for (I k = axes[2].first_window(w); k <= axes[2].last_window(w); ++k) {
          if (axes[2].holds(k, w)) body((i * axes[1].out + j) * axes[2].out + k);
        }
      }
    }
  }
  // Windows worth a warp each.
  bool large_windows() const { return in_size() / std::max<I>(out_size(), 1) >= 4 * kWarpSize; }
  // A thread or a warp per window.
  LaunchShape shape() const {
    const int64_t windows = int64_t{planes} * out_size();
    if (large_windows()) return row_shape<RowForm<WarpTeam, 1, 0>>(windows, in_size());
    return items(windows, 256, 1 << 20);
  }
};

// Calls body(plane, window, first, step) for each window of this thread or, kWarp, of its warp.
template <bool kWarp, class I, class Body>
ORTRAIN_DEVICE void for_each_pooled(const Pool<I>& pool, const Body& body) {
  const I size = pool.out_size();
  const auto visit = [&](int64_t number, I first, I step) {
    const I i = static_cast<I>(number);
    body(i / size, i % size, first, step);
  };
  if constexpr (kWarp) {
    for (int64_t i = WarpTeam::index(); i < int64_t{pool.planes} * size; i += WarpTeam::count()) {
      visit(i, I{lane()}, I{kWarpSize});
    }
  } else {
    for_each_item(int64_t{pool.planes} * size, [&](int64_t i) { visit(i, I{0}, I{1}); });
  }
}

// As in PyTorch the last NaN wins, otherwise the first of equal elements.
template <class C, class I>
struct Largest {
  I place;  // -1: of no element
  C value;
};
struct JoinLargest {
  template <class C, class I>
  ORTRAIN_DEVICE Largest<C, I> operator()(const Largest<C, I>& a, const Largest<C, I>& b) const {
    if (a.place < 0 || b.place < 0) return a.place < 0 ? b : a;
    const bool a_is_nan = a.value != a.value, b_is_nan = b.value != b.value;
    if (a_is_nan != b_is_nan) return a_is_nan ? a : b;
    if (a_is_nan) return a.place < b.place ? b : a;
    if (a.value == b.value) return a.place < b.place ? a : b;
    return a.value < b.value ? b : a;
  }
};

// y, indices (over the whole input) and places (in the plane) may be null.
template <class T, bool kWarp, class I>
__global__ void __launch_bounds__(256)
    max_pool(Pool<I> pool, const T* x, T* y, int64_t* indices, I* places) {
  using C = ComputeType<T>;
  const I in_size = pool.in_size(), out_size = pool.out_size();
  for_each_pooled<kWarp>(pool, [&](I plane, I at, I first, I step) {
    Largest<C, I> best{-1, C{0}};
    pool.for_each_element(at, first, step, [&](I i) {
      best = JoinLargest()(best, Largest<C, I>{i, static_cast<C>(x[plane * in_size + i])});
    });
    if constexpr (kWarp) best = warp_merge(best, JoinLargest());
    if (first != 0) return;
    const I to = plane * out_size + at;
    const C none = -std::numeric_limits<C>::infinity();
    if (y != nullptr) y[to] = static_cast<T>(best.place < 0 ? none : best.value);
    if (indices != nullptr) indices[to] = best.place < 0 ? -1 : plane * in_size + best.place;
    if (places != nullptr) places[to] = best.place;
  });
}

// Each element gathers from the windows that took it.
template <class T, class I>
__global__ void __launch_bounds__(256)
    max_pool_grad(Pool<I> pool, const T* dy, const I* places, T* dx) {
  using C = ComputeType<T>;
  const I in_size = pool.in_size(), out_size = pool.out_size();
  for_each_item(int64_t{pool.planes} * in_size, [&](int64_t number) {
    const I i = static_cast<I>(number);
    const I plane = i / in_size, at = i % in_size;
    C sum = 0;
    pool.for_each_window(at, [&](I window) {
      const I from = plane * out_size + window;
      if (places[from] == at) sum += static_cast<C>(dy[from]);
    });
    dx[i] = static_cast<T>(sum);
  });
}

template <class T, bool kWarp, class I>
__global__ void __launch_bounds__(256) average_pool(Pool<I> pool, const T* x, T* y) {
  using C = ComputeType<T>;
  const I in_size = pool.in_size(), out_size = pool.out_size();
  for_each_pooled<kWarp>(pool, [&](I plane, I at, I first, I step) {
    C sum = 0;
    pool.for_each_element(at, first, step,
                          [&](I i) { sum += static_cast<C>(x[plane * in_size + i]); });
    if constexpr (kWarp) sum = warp_reduce(sum, Sum());
    if (first == 0) {
      y[plane * out_size + at] = static_cast<T>(sum / static_cast<C>(pool.divisor(at)));
    }
  });
}

template <class T, class I>
__global__ void __launch_bounds__(256) average_pool_grad(Pool<I> pool, const T* dy, T* dx) {
  using C = ComputeType<T>;
  const I in_size = pool.in_size(), out_size = pool.out_size();
  for_each_item(int64_t{pool.planes} * in_size, [&](int64_t number) {
    const I i = static_cast<I>(number);
    const I plane = i / in_size;
    C sum = 0;
    pool.for_each_window(i % in_size, [&](I window) {
      sum += static_cast<C>(dy[plane * out_size + window]) / static_cast<C>(pool.divisor(window));
    });
    dx[i] = static_cast<T>(sum);
  });
}

// --- what a node's attributes say

enum class Windows { sliding, adaptive, global };

using WidePool = Pool<int64_t>;

WidePool pool_of(const NodeSpec& spec, const TensorSpec& x, Windows kind, bool averages) {
  WidePool pool;
  const std::vector<int64_t> spatial(x.dims.begin() + 2, x.dims.end());
  pool.planes = x.dims[0] * x.dims[1];
  if (kind == Windows::global) {
    PoolAxis<int64_t>& all = pool.axes[kAxes - 1];
    all.in = num_elements(spatial);
    all.kernel = all.in;
  } else if (kind == Windows::adaptive) {
    const std::vector<int64_t>& size = spec.attrs().ints("output_size");
    for (size_t i = 0; i < size.size(); ++i) {
      PoolAxis<int64_t>& axis = pool.axes[static_cast<int>(kAxes - size.size() + i)];
      axis.in = spatial[i];
      axis.out = size[i];
      axis.stride = 0;
    }
  } else {
    pool.count_pads = averages && spec.attrs().int_("count_include_pad") != 0;
    const std::vector<ops::WindowAxis> windows =
        ops::concrete_windows(ops::read_windows(spec.attrs(), spatial.size(), {}), spatial);
    for (int i = 0; i < kAxes; ++i) {
      const ops::WindowAxis& from = windows[static_cast<size_t>(i)];
      pool.axes[i] = {from.in,       from.out,       from.kernel, from.stride,
                      from.dilation, from.pad_begin, from.pad_end};
    }
  }
  return pool;
}

// Whether all that the kernels compute of it is below 2^31.
bool is_narrow(const WidePool& pool) {
  constexpr int64_t kMost = int64_t{1} << 29;
  const auto fits = [](int64_t a, int64_t b) { return b == 0 || (a <= kMost && a <= kMost / b); };
  int64_t in = pool.planes, out = pool.planes;
  if (in > kMost) return false;
  for (const PoolAxis<int64_t>& axis : pool.axes.values) {
    if (!fits(in, axis.in) || !fits(out, axis.out) || !fits(axis.in + 1, axis.out + 1) ||
        !fits(axis.kernel, axis.dilation) || !fits(axis.out + 1, axis.stride) ||
        std::max(std::abs(axis.pad_begin), std::abs(axis.pad_end)) > kMost / 2) {
      return false;
    }
    in *= axis.in;
    out *= axis.out;
  }
  return true;
}

// Calls run(pool) with the narrowest index type that holds it.
template <class Run>
auto with_narrowest(const WidePool& pool, const Run& run) {
  if (!is_narrow(pool)) return run(pool);
  Pool<int32_t> narrow;
  narrow.planes = narrow_checked<int32_t>(pool.planes);
  narrow.count_pads = pool.count_pads;
  for (int i = 0; i < kAxes; ++i) {
    const PoolAxis<int64_t>& axis = pool.axes[i];
    const auto all = [](auto... values) {
      return PoolAxis<int32_t>{narrow_checked<int32_t>(values)...};
    };
    narrow.axes[i] = all(axis.in, axis.out, axis.kernel, axis.stride, axis.dilation, axis.pad_begin,
                         axis.pad_end);
  }
  return run(narrow);
}

template <class T, class I>
void launch_max(const KernelArgs& args, const Pool<I>& pool, const T* x, T* y, int64_t* indices,
                I* places) {
  launch(pool.large_windows() ? max_pool<T, true, I> : max_pool<T, false, I>, pool.shape(),
         args.stream, pool, x, y, indices, places);
}

// A thread per element of the input.
template <class I>
LaunchShape of_elements(const Pool<I>& pool) {
  return items(int64_t{pool.planes} * pool.in_size(), 256, 1 << 20);
}

Kernel max_kernel(Windows kind) {
  return {.name = "gather", .make = [kind](NodeSpec& spec) {
            const WidePool wide = pool_of(spec, spec.input(0), kind, false);
            const bool values = spec.has_output(0), indices = spec.has_output(1);
            return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
              using T = typename decltype(tag)::type;
              return with_narrowest(wide, [&]<class I>(const Pool<I>& pool) -> KernelFn {
                return [=](const KernelArgs& args) {
                  launch_max<T, I>(args, pool, args.input<T>(0),
                                   values ? args.output<T>(0) : nullptr,
                                   indices ? args.output<int64_t>(1) : nullptr, nullptr);
                };
              });
            });
          }};
}

Kernel max_grad_kernel(Windows kind) {
  return {.name = "gather", .make = [kind](NodeSpec& spec) {
            const WidePool wide = pool_of(spec, spec.input(1), kind, false);
            return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
              using T = typename decltype(tag)::type;
              return with_narrowest(wide, [&]<class I>(const Pool<I>& pool) -> KernelFn {
                spec.request_workspace(bytes_of<I>(spec.input(0).numel()));
                return [pool](const KernelArgs& args) {
                  auto* places = static_cast<I*>(args.workspace);
                  launch_max<T, I>(args, pool, args.input<T>(1), nullptr, nullptr, places);
                  launch(max_pool_grad<T, I>, of_elements(pool), args.stream, pool,
                         args.input<T>(0), places, args.output<T>(0));
                };
              });
            });
          }};
}

// Windows that share an axis out multiply their number by its extent.
std::optional<std::string> why_no_average(Windows kind, const NodeSpec& spec, const TensorSpec& x) {
  constexpr int64_t kMost = int64_t{1} << 62;
  if (kind != Windows::adaptive) return std::nullopt;
  const WidePool pool = pool_of(spec, x, kind, true);
  for (const PoolAxis<int64_t>& axis : pool.axes.values) {
    if (axis.out > 0 && axis.in > kMost / axis.out) {
      return str(axis.out, " windows of ", axis.in, " elements");
    }
  }
  return std::nullopt;
}

Kernel average_kernel(Windows kind) {
  return {
      .name = "gather",
      .why_not = [kind](const NodeSpec& spec) { return why_no_average(kind, spec, spec.input(0)); },
      .make =
          [kind](NodeSpec& spec) {
            const WidePool wide = pool_of(spec, spec.input(0), kind, true);
            return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
              using T = typename decltype(tag)::type;
              return with_narrowest(wide, [&]<class I>(const Pool<I>& pool) -> KernelFn {
                return [pool](const KernelArgs& args) {
                  launch(
                      pool.large_windows() ? average_pool<T, true, I> : average_pool<T, false, I>,
                      pool.shape(), args.stream, pool, args.input<T>(0), args.output<T>(0));
                };
              });
            });
          }};
}

Kernel average_grad_kernel(Windows kind) {
  return {.name = "gather",
          .why_not =
              [kind](const NodeSpec& spec) { return why_no_average(kind, spec, spec.output(0)); },
          .make =
              [kind](NodeSpec& spec) {
                const WidePool wide = pool_of(spec, spec.output(0), kind, true);
                return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
                  using T = typename decltype(tag)::type;
                  return with_narrowest(wide, [&]<class I>(const Pool<I>& pool) -> KernelFn {
                    return [pool](const KernelArgs& args) {
                      launch(average_pool_grad<T, I>, of_elements(pool), args.stream, pool,
                             args.input<T>(0), args.output<T>(0));
                    };
                  });
                });
              }};
}

}  // namespace

void register_pool(KernelRegistry& registry) {
  registry.add("MaxPool", {max_kernel(Windows::sliding)});
  registry.add("ortrain::MaxPoolGrad", {max_grad_kernel(Windows::sliding)});
  registry.add("AveragePool", {average_kernel(Windows::sliding)});
  registry.add("ortrain::AveragePoolGrad", {average_grad_kernel(Windows::sliding)});
  registry.add("GlobalAveragePool", {average_kernel(Windows::global)});
  registry.add("ortrain::GlobalAveragePoolGrad", {average_grad_kernel(Windows::global)});
  registry.add("GlobalMaxPool", {max_kernel(Windows::global)});
  registry.add("ortrain::GlobalMaxPoolGrad", {max_grad_kernel(Windows::global)});
  registry.add("ortrain::AdaptiveAveragePool", {average_kernel(Windows::adaptive)});
  registry.add("ortrain::AdaptiveAveragePoolGrad", {average_grad_kernel(Windows::adaptive)});
}

}  // namespace ortrain::gpu
