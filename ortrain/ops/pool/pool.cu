// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <limits>

#include "ortrain/base/narrow.h"
#include "ortrain/ops/pool/pool_windows.h"
#include "ortrain/ops/window/window.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

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

// A warp per row of the planes, [planes, depth, height] of them: where rows are long enough, what
// depends on the row alone is computed once. Calls body(plane, depth, height, row of the plane).
template <class I, class Body>
ORTRAIN_DEVICE void for_each_row(I planes, I depth, I height, const Body& body) {
  const I of_plane = depth * height;
  for (int64_t i = WarpTeam::index(); i < int64_t{planes} * of_plane; i += WarpTeam::count()) {
    const I plane = static_cast<I>(i) / of_plane, row = static_cast<I>(i) % of_plane;
    body(plane, row / height, row % height, row);
  }
}
inline bool has_long_rows(int64_t width) { return width >= kWarpSize / 2; }

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
    max_pool_grad_rows(Pool<I> pool, const T* dy, const I* places, T* dx) {
  using C = ComputeType<T>;
  const I width = pool.axes[2].in, out_size = pool.out_size();
  for_each_row(pool.planes, pool.axes[0].in, pool.axes[1].in, [&](I plane, I d, I h, I row) {
    for (I w = lane(); w < width; w += kWarpSize) {
      const I at = row * width + w;
      C sum = 0;
      pool.for_each_window(d, h, w, [&](I window) {
        const I from = plane * out_size + window;
        if (places[from] == at) sum += static_cast<C>(dy[from]);
      });
      dx[plane * pool.in_size() + at] = static_cast<T>(sum);
    }
  });
}
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
    PoolAxis<int64_t>& all = pool.axes[kPoolAxes - 1];
    all.in = num_elements(spatial);
    all.kernel = all.in;
  } else if (kind == Windows::adaptive) {
    const std::vector<int64_t>& size = spec.attrs().ints("output_size");
    for (size_t i = 0; i < size.size(); ++i) {
      PoolAxis<int64_t>& axis = pool.axes[static_cast<int>(kPoolAxes - size.size() + i)];
      axis.in = spatial[i];
      axis.out = size[i];
      axis.stride = 0;
    }
  } else {
    pool.count_pads = averages && spec.attrs().int_("count_include_pad") != 0;
    const std::vector<ops::WindowAxis> windows =
        ops::concrete_windows(ops::read_windows(spec.attrs(), spatial.size(), {}), spatial);
    for (int i = 0; i < kPoolAxes; ++i) {
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
  for (int i = 0; i < kPoolAxes; ++i) {
    const PoolAxis<int64_t>& axis = pool.axes[i];
    const auto all = [](auto... values) {
      return PoolAxis<int32_t>{narrow_checked<int32_t>(values)...};
    };
    narrow.axes[i] = all(axis.in, axis.out, axis.kernel, axis.stride, axis.dilation, axis.pad_begin,
                         axis.pad_end);
  }
  return run(narrow);
}

// A warp for each.
LaunchShape of_rows(int64_t rows) { return items(rows * kWarpSize, 256, 1 << 20); }

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
                  const PoolAxis<I>* axes = pool.axes.values;
                  const bool by_rows = has_long_rows(axes[2].in);
                  launch(by_rows ? max_pool_grad_rows<T, I> : max_pool_grad<T, I>,
                         by_rows ? of_rows(int64_t{pool.planes} * axes[0].in * axes[1].in)
                                 : of_elements(pool),
                         args.stream, pool, args.input<T>(0), places, args.output<T>(0));
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
