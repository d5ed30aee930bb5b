// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace ortrain::cpu {

// Who uses a buffer; a kernel that calls another one must not share its slot.
enum class ScratchSlot { kGemmA, kGemmB, kGemmC, kConvert, kAttention, kKernel, kCount };

// At least `bytes` bytes, 64-byte aligned, uninitialised, private to the calling thread and kept
// for its next call with the same slot.
void* scratch_bytes(ScratchSlot slot, size_t bytes);

template <class T>
T* scratch(ScratchSlot slot, int64_t count) {
  return static_cast<T*>(scratch_bytes(slot, static_cast<size_t>(count) * sizeof(T)));
}

}  // namespace ortrain::cpu
