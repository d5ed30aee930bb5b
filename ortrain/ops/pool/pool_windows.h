// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "ortrain/gpu/row_forms.h"

// Windows of pooling over up to three axes, by index arithmetic of a type I: int32_t where all of
// it fits, since elements find their windows by divisions.
namespace ortrain::gpu {

inline constexpr int kPoolAxes = 3;

template <class I>
ORTRAIN_HOST_DEVICE constexpr I pool_ceil_div(I a, I b) {
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
    return first >= 0 ? first : first + pool_ceil_div(-first, dilation) * dilation;
  }
  ORTRAIN_DEVICE I end(I o) const {
    if (adaptive()) return pool_ceil_div((o + 1) * in, out);
    const I last = start(o) + (kernel - 1) * dilation + 1;
    return last < in ? last : in;
  }
  // What an average divides by. Windows of ceil_mode reach beyond the padding; that never counts.
  ORTRAIN_DEVICE I count(I o, bool count_pads) const {
    I elements = 0;
    if (count_pads && !adaptive()) {
      elements = pool_ceil_div(in + pad_end - start(o), dilation);
      if (elements > kernel) elements = kernel;
    } else {
      elements = pool_ceil_div(end(o) - begin(o), dilation);
    }
    return elements > 1 ? elements : 1;
  }
  // The windows [first, last] that may hold element i.
  ORTRAIN_DEVICE I first_window(I i) const {
    if (adaptive()) return i * out / in;
    const I from = i + pad_begin - (kernel - 1) * dilation;
    return from <= 0 ? 0 : pool_ceil_div(from, stride);
  }
  ORTRAIN_DEVICE I last_window(I i) const {
    const I last = adaptive() ? pool_ceil_div((i + 1) * out, in) - 1 : (i + pad_begin) / stride;
    return last < out ? last : out - 1;
  }
  // Of those.
  ORTRAIN_DEVICE bool holds(I o, I i) const {
    if (adaptive()) return i >= begin(o) && i < end(o);
    return dilation == 1 || (i - start(o)) % dilation == 0;
  }
};

template <class I>
struct Pool {
  I planes = 0;
  bool count_pads = false;
  DeviceArray<PoolAxis<I>, kPoolAxes> axes;

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
        width_end <= width_begin ? 0 : pool_ceil_div(width_end - width_begin, axes[2].dilation);
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
    const I row = at / axes[2].in;
    for_each_window(row / axes[1].in, row % axes[1].in, at % axes[2].in, body);
  }
  // The same for the element at (d, h, w).
  template <class Body>
  ORTRAIN_DEVICE void for_each_window(I d, I h, I w, const Body& body) const {
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

}  // namespace ortrain::gpu
