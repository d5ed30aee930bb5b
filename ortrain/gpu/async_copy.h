// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/gpu/device_code.h"

// Copies from global to shared memory that run while the thread goes on: cp.async on CUDA, plain
// copies elsewhere. Each thread waits for its own; a barrier makes them seen by others.
namespace ortrain::gpu {

// Sixteen bytes, both addresses multiples of 16; zeros if nothing is `there`, which is not read then.
ORTRAIN_DEVICE void copy_16_bytes(void* shared, const void* global, bool there = true) {
#if defined(__CUDACC__) && !defined(__HIPCC__)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(global),
                 "r"(there ? 16 : 0)
               : "memory");
#else
  struct alignas(16) Bytes {
    uint64_t halves[2];
  };
  *static_cast<Bytes*>(shared) = there ? *static_cast<const Bytes*>(global) : Bytes{};
#endif
}

// A float likewise, at a multiple of 4 bytes.
ORTRAIN_DEVICE void copy_float(float* shared, const float* global, bool there) {
#if defined(__CUDACC__) && !defined(__HIPCC__)
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(global),
                 "r"(there ? 4 : 0)
               : "memory");
#else
  *shared = there ? *global : 0.0f;
#endif
}

// What was begun since the last call becomes one group.
ORTRAIN_DEVICE void end_copy_group() {
#if defined(__CUDACC__) && !defined(__HIPCC__)
  asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}

// Until at most the kLeft groups begun last are not done.
template <int kLeft>
ORTRAIN_DEVICE void wait_for_copies() {
#if defined(__CUDACC__) && !defined(__HIPCC__)
  asm volatile("cp.async.wait_group %0;" : : "n"(kLeft) : "memory");
#endif
}

}  // namespace ortrain::gpu
