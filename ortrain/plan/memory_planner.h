// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ortrain/base/byte_count.h"

namespace ortrain {

// A block of memory and the steps during which it is in use, both ends included.
struct BufferLifetime {
  ByteCount bytes;
  int first_step = 0;
  int last_step = 0;
};

struct MemoryLayout {
  std::vector<size_t> offsets;  // one per buffer, multiples of kArenaAlignment
  size_t total_bytes = 0;       // size of the arena
  size_t lower_bound = 0;       // the most bytes alive at any one step: no layout can be smaller
};

inline constexpr size_t kArenaAlignment = 64;

// Places rectangles lifetime x bytes in an arena so that none overlap: largest first, each into the
// lowest gap that fits among those placed which are alive at the same time. A second order (by
// start of life) is tried too, the smaller arena wins. O(n^2) in the number of buffers. Throws
// ShapeError where an arena would leave the address space.
MemoryLayout plan_memory(const std::vector<BufferLifetime>& buffers);

}  // namespace ortrain
