// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "ortrain/base/dim.h"
#include "ortrain/cpu/threads.h"

namespace ortrain::cpu {

// A tensor as [outer, length, inner] around one axis.
struct AxisLines {
  int64_t outer = 1, length = 1, inner = 1;
  int64_t lines() const { return outer * inner; }
};

inline AxisLines axis_lines(const Dims& dims, int64_t axis) {
  const auto split = dims.begin() + normalize_axis(axis, dims.size());
  return {num_elements(Dims(dims.begin(), split)), *split,
          num_elements(Dims(split + 1, dims.end()))};
}

// Neighbouring lines that a thread walks along side by side.
inline constexpr int64_t kLineBlock = 64;

// Calls body(o, i, width) for blocks of at most kLineBlock lines that cover them all: their first
// elements stand at o * length * inner + i, + 1, ..., and each next element `inner` further on.
template <typename Body>
void for_each_line_block(const AxisLines& a, const Body& body) {
  const int64_t blocks = (a.inner + kLineBlock - 1) / kLineBlock;
  const int64_t work = std::max<int64_t>(a.length * std::min(a.inner, kLineBlock), 1);
  parallel_for(a.outer * blocks, 16384 / work + 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t i = unit % blocks * kLineBlock;
      body(unit / blocks, i, std::min(kLineBlock, a.inner - i));
    }
  });
}

}  // namespace ortrain::cpu
