// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "ortrain/gpu/launch.h"

namespace ortrain::gpu {

// A piece of a whole tensor that is seen as rows: of each row, the `bytes` that begin `offset`
// bytes after the row does. The piece itself is dense; null and 0 bytes: nothing to move.
struct Part {
  const void* data = nullptr;
  int64_t bytes = 0;
  int64_t offset = 0;
};

// Puts the parts together, or takes them out of the whole, `rows` of `row_bytes` each. Addresses
// and numbers of bytes are multiples of the element's size. Few launches for many parts: their
// addresses go as arguments.
void join_parts(std::span<const Part> parts, void* whole, int64_t rows, int64_t row_bytes,
                void* stream);
void cut_parts(std::span<const Part> parts, const void* whole, int64_t rows, int64_t row_bytes,
               void* stream);

// Bytes from one place on the device to another; the places do not overlap.
struct Move {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t bytes = 0;
};
// All of them in few launches. Those from a place to itself are left out.
void copy_all(std::span<const Move> moves, void* stream);

}  // namespace ortrain::gpu
