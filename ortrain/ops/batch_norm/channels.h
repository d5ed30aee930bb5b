// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "ortrain/base/dim.h"
#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/simd/channel_rows.h"
#include "ortrain/cpu/threads.h"

namespace ortrain::cpu {

// x as [N, C, S]; every loop is parallel over channels, and sums are made in double in an order
// that does not depend on the threads.
struct Layout {
  int64_t batch = 0, channels = 0, size = 0;

  explicit Layout(const Dims& x) : batch(x[0]), channels(x[1]), size(1) {
    for (size_t i = 2; i < x.size(); ++i) size *= x[i];
  }
  int64_t count() const { return batch * size; }  // per channel
  int64_t offset(int64_t n, int64_t c) const { return (n * channels + c) * size; }
};

// term(i) for i in [0, n), summed in eight lanes so that the loop vectorises.
template <typename Term>
double lane_sum(int64_t n, Term&& term) {
  constexpr int64_t kLanes = 8;
  std::array<double, kLanes> lanes{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (int64_t lane = 0; i < n; ++i, ++lane) lanes[lane] += term(i);
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

// Sum over images [first, first + images) of channel c; term gets the element's offset.
template <typename Term>
double channel_sum(const Layout& layout, int64_t first, int64_t images, int64_t c, Term&& term) {
  double sum = 0;
  if (layout.size < 8) {
    for (int64_t s = 0; s < layout.size; ++s) {
      sum += lane_sum(images, [&](int64_t n) { return term(layout.offset(first + n, c) + s); });
    }
    return sum;
  }
  for (int64_t n = first; n < first + images; ++n) {
    const int64_t at = layout.offset(n, c);
    sum += lane_sum(layout.size, [&](int64_t i) { return term(at + i); });
  }
  return sum;
}

template <typename Body>
void for_channel_elements(const Layout& layout, int64_t first, int64_t images, int64_t c,
                          Body&& body) {
  for (int64_t n = first; n < first + images; ++n) {
    const int64_t at = layout.offset(n, c);
    for (int64_t i = at; i < at + layout.size; ++i) body(i);
  }
}

template <typename Body>
void for_each_channel(const Layout& layout, Body&& body) {
  const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, layout.count()));
  parallel_for(layout.channels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) body(c);
  });
}

struct Moments {
  double mean = 0;
  double variance = 0;  // biased
};

// The sums over dy that every gradient of a normalisation is made of.
struct GradientSums {
  double dy = 0;
  double dy_centred = 0;  // dy * (x - mean)
};

// What the kernels do to images [first, first + images) of one channel, element by element.
template <typename Element>
struct Scalar {
  using T = Element;
  using C = ComputeType<T>;

  // Two passes, so that a mean far from zero costs no digits.
  static Moments moments(const Layout& layout, int64_t first, int64_t images, int64_t c,
                         const T* x) {
    const double count = static_cast<double>(images * layout.size);
    if (count == 0) return {};
    const double mean = channel_sum(layout, first, images, c,
                                    [&](int64_t i) { return static_cast<double>(x[i]); }) /
                        count;
    const double squares = channel_sum(layout, first, images, c, [&](int64_t i) {
      const double distance = static_cast<double>(x[i]) - mean;
      return distance * distance;
    });
    return {mean, squares / count};
  }

  // y = (x - mean) * factor + shift.
  static void normalise(const Layout& layout, int64_t first, int64_t images, int64_t c, const T* x,
                        double mean, double factor, double shift, T* y) {
    const C m = static_cast<C>(mean), f = static_cast<C>(factor), s = static_cast<C>(shift);
    for_channel_elements(layout, first, images, c, [&](int64_t i) {
      y[i] = static_cast<T>((static_cast<C>(x[i]) - m) * f + s);
    });
  }

  static GradientSums gradient_sums(const Layout& layout, int64_t first, int64_t images, int64_t c,
                                    const T* dy, const T* x, double mean) {
    if (dy == nullptr) return {};
    return {channel_sum(layout, first, images, c,
                        [&](int64_t i) { return static_cast<double>(dy[i]); }),
            channel_sum(layout, first, images, c, [&](int64_t i) {
              return static_cast<double>(dy[i]) * (static_cast<double>(x[i]) - mean);
            })};
  }

  // dx = dy * factor + (x - mean) * slope + shift; dy may be null.
  static void input_gradient(const Layout& layout, int64_t first, int64_t images, int64_t c,
                             const T* dy, const T* x, double mean, double factor, double slope,
                             double shift, T* dx) {
    const C m = static_cast<C>(mean), f = static_cast<C>(factor);
    const C k = static_cast<C>(slope), s = static_cast<C>(shift);
    for_channel_elements(layout, first, images, c, [&](int64_t i) {
      const C centred = (static_cast<C>(x[i]) - m) * k + s;
      dx[i] = static_cast<T>(dy ? static_cast<C>(dy[i]) * f + centred : centred);
    });
  }
};

// The same on whole rows of vectors; float and double.
template <typename Element>
struct Rows {
  using T = Element;

  static const ChannelRows<T>& rows() {
    static const ChannelRows<T> table = channel_rows<T>();
    return table;
  }

  static Moments moments(const Layout& layout, int64_t first, int64_t images, int64_t c,
                         const T* x) {
    const double count = static_cast<double>(images * layout.size);
    if (count == 0) return {};
    double sum = 0;
    for (int64_t n = first; n < first + images; ++n) {
      sum += rows().sum(x + layout.offset(n, c), layout.size);
    }
    const double mean = sum / count;
    double squares = 0;
    for (int64_t n = first; n < first + images; ++n) {
      squares += rows().squared_distance(x + layout.offset(n, c), mean, layout.size);
    }
    return {mean, squares / count};
  }

  static void normalise(const Layout& layout, int64_t first, int64_t images, int64_t c, const T* x,
                        double mean, double factor, double shift, T* y) {
    for (int64_t n = first; n < first + images; ++n) {
      const int64_t at = layout.offset(n, c);
      rows().affine(x + at, static_cast<T>(mean), static_cast<T>(factor), static_cast<T>(shift),
                    y + at, layout.size);
    }
  }

  static GradientSums gradient_sums(const Layout& layout, int64_t first, int64_t images, int64_t c,
                                    const T* dy, const T* x, double mean) {
    GradientSums sums;
    if (dy == nullptr) return sums;
    for (int64_t n = first; n < first + images; ++n) {
      const int64_t at = layout.offset(n, c);
      rows().gradient_sums(dy + at, x + at, mean, layout.size, &sums.dy, &sums.dy_centred);
    }
    return sums;
  }

  static void input_gradient(const Layout& layout, int64_t first, int64_t images, int64_t c,
                             const T* dy, const T* x, double mean, double factor, double slope,
                             double shift, T* dx) {
    for (int64_t n = first; n < first + images; ++n) {
      const int64_t at = layout.offset(n, c);
      if (dy == nullptr) {
        rows().affine(x + at, static_cast<T>(mean), static_cast<T>(slope), static_cast<T>(shift),
                      dx + at, layout.size);
      } else {
        rows().input_gradient(dy + at, x + at, static_cast<T>(mean), static_cast<T>(factor),
                              static_cast<T>(slope), static_cast<T>(shift), dx + at, layout.size);
      }
    }
  }
};

}  // namespace ortrain::cpu
