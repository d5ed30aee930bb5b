// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/gpu/row_forms.h"

namespace ortrain::gpu {

// Lines along an axis that is not the last one: [outer, size, inner]. Lanes stand on neighbouring
// lines, the warps of a block on steps along the axis.
struct ColumnTiles {
  int64_t outer, size, inner;

  ORTRAIN_HOST_DEVICE int64_t tiles() const { return (inner + kWarpSize - 1) / kWarpSize; }
  LaunchShape shape(int64_t most_blocks = int64_t{1} << 20) const {
    return {.blocks = block_count(std::min(outer * tiles(), most_blocks)),
            .threads = row_threads(size * kWarpSize, 8, 8 * kWarpSize)};
  }

  // body(line, offset of its first element, its length) for the tiles of this block: a line per
  // lane, of length 0 where the lane has none.
  template <class Body>
  ORTRAIN_DEVICE void for_each_line(const Body& body) const {
    for (int64_t tile = blockIdx.x; tile < outer * tiles(); tile += gridDim.x) {
      const int64_t column = tile % tiles() * kWarpSize + lane();
      const int64_t o = tile / tiles();
      body(o * inner + column, o * size * inner + column, column < inner ? size : int64_t{0});
    }
  }
  // body(position along the axis, offset) for the part of its line that this thread has.
  template <class Body>
  ORTRAIN_DEVICE void for_each_step(int64_t start, int64_t length, const Body& body) const {
    const int64_t warps = blockDim.x / kWarpSize;
    for (int64_t i = warp(); i < length; i += warps) body(i, start + i * inner);
  }
};

}  // namespace ortrain::gpu
