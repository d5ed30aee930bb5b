// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/words.h"

namespace ortrain::gpu {

// What stands where a place of the output has no element of the input: a value, or another element.
enum class Outside { value, edge, reflect, wrap };
// By Pad's name; "constant" is a value.
Outside outside_of(const std::string& mode);

// The element of [0, extent) that place `at` of an axis is a copy of.
ORTRAIN_HOST_DEVICE inline int64_t source_of(int64_t at, int64_t extent, Outside outside) {
  if (at >= 0 && at < extent) return at;
  if (outside == Outside::edge) return at < 0 ? 0 : extent - 1;
  if (outside == Outside::wrap) return (at % extent + extent) % extent;
  if (extent == 1) return 0;
  const int64_t period = 2 * (extent - 1);
  const int64_t phase = (at % period + period) % period;
  return phase < extent ? phase : period - phase;
}

// One axis: element i of the input stands at place start + i * step of the output, step > 0. With
// anything but Outside::value the step is 1.
struct WindowAxis {
  int64_t out_extent = 1;
  int64_t start = 0;
  int64_t step = 1;
  int64_t in_extent = 1;
  int64_t in_stride = 1;

  bool is_whole() const { return start == 0 && step == 1 && in_extent == out_extent; }
};

// Writes all of a dense output of which a window shows the input (Pad, the gradient of Slice), in
// one launch.
class WindowCopy {
 public:
  static constexpr int kMostAxes = 12;

  // element_size is 1, 2, 4 or 8. Throws UnsupportedError if more than kMostAxes axes remain after
  // merging.
  WindowCopy(size_t element_size, std::vector<WindowAxis> axes, Outside outside,
             int64_t in_offset = 0);

  // `value`: one element on the device; null is zero.
  void run(const void* in, void* out, const void* value, void* stream) const;

 private:
  int64_t size_;
  std::vector<WindowAxis> axes_;
  Outside outside_;
  int64_t in_offset_;
  int64_t elements_ = 1;
  int word_;
};

}  // namespace ortrain::gpu
