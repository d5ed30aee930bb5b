// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "ortrain/base/error.h"

namespace ortrain::cpu {

// Throws the IndexError; apart, to keep the check small.
[[noreturn]] inline void throw_index_error(const std::string& context, int64_t index,
                                           int64_t position, int64_t extent, int64_t axis) {
  throw IndexError(str(context, "indices[", position, "] = ", index,
                       " is out of range for an extent of ", extent, " (axis ", axis,
                       "): allowed are ", -extent, " to ", extent - 1));
}

// Every index of `indices` to [0, extent): negative ones count from the end. `context` is that of
// the node. Checks before anything is read or written, so a bad index leaves no partial result.
template <typename I>
void check_indices(const I* indices, int64_t count, int64_t extent, int64_t axis,
                   const std::string& context) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = indices[i];
    if (index < -extent || index >= extent) {
      throw_index_error(context, index, i, extent, axis);
    }
  }
}

inline int64_t wrapped(int64_t index, int64_t extent) { return index < 0 ? index + extent : index; }

}  // namespace ortrain::cpu
