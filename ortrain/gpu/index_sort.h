// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ortrain/base/byte_count.h"

// Sums of what comes before, and stable sorts, on a device.
namespace ortrain::gpu {

// starts[i] = the sum of counts[0 .. i-1], for i up to `count`. Sums are below 2^31.
class PrefixSums {
 public:
  PrefixSums() = default;
  explicit PrefixSums(int64_t count) : count_(count) {}
  ByteCount workspace_bytes() const;
  // `workspace`: as many bytes; `starts`: count + 1 elements.
  void run(const int32_t* counts, int32_t* starts, void* workspace, void* stream) const;

 private:
  int64_t count_ = 0;
};

// The positions in the order of what they point to, those of one target in ascending order, those
// that point to none behind them: a radix sort from the lowest digit.
class IndexSort {
 public:
  IndexSort() = default;
  // Both are below 2^31.
  IndexSort(int64_t positions, int64_t targets);
  ByteCount workspace_bytes() const;
  // `targets`: per position, -1 for none. `sorted`: the positions. Without targets nothing is done.
  void run(const int32_t* targets, int32_t* sorted, void* workspace, void* stream) const;

 private:
  int64_t positions_ = 0, targets_ = 0, blocks_ = 0;
  int passes_ = 0;
  PrefixSums sums_;
};

}  // namespace ortrain::gpu
