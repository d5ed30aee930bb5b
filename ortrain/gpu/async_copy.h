// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/gpu/device_code.h"

// Copies from global to shared memory that run while the thread goes on: cp.async on CUDA, plain
// copies elsewhere. Each thread waits for its own; a barrier makes them seen by others.
namespace ortrain::gpu {

// Sixteen bytes, both addresses multiples of 16.
ORTRAIN_DEVICE void copy_16_bytes(void* shared, const void* global) {
#if defined(__CUDACC__) && !defined(__HIPCC__)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(global)
               : "memory");
#else
  struct alignas(16) Bytes {
    uint64_t halves[2];
  };
  *static_cast<Bytes*>(shared) = *static_cast<const Bytes*>(global);
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
