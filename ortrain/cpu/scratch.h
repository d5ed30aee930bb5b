// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "ortrain/base/byte_count.h"

namespace ortrain::cpu {

// Who uses a buffer; a kernel that calls another one must not share its slot.
enum class ScratchSlot { kGemmA, kGemmB, kGemmC, kConvert, kAttention, kKernel, kCount };

// At least `bytes` bytes, 64-byte aligned, uninitialised, private to the calling thread and kept
// for its next call with the same slot.
void* scratch_bytes(ScratchSlot slot, size_t bytes);

// Room for extents[0] * extents[1] * ... numbers.
template <class T, std::integral... Extents>
T* scratch(ScratchSlot slot, Extents... extents) {
  return static_cast<T*>(scratch_bytes(slot, bytes_of<T>(extents...).value()));
}

}  // namespace ortrain::cpu
