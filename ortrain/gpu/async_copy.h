// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/gpu/device_code.h"

// Copies from global to shared memory that run while the thread goes on: cp.async on CUDA, plain
// copies on AMD's devices. Each thread waits for its own; a barrier makes them seen by others.
namespace ortrain::gpu {

// Sixteen bytes, both addresses multiples of 16; zeros if nothing is `there`, which is not read
// then.
ORTRAIN_DEVICE void copy_16_bytes(void* shared, const void* global, bool there = true) {
#if defined(__CUDACC__) && !defined(__HIPCC__)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(global),
                 "r"(there ? 16 : 0)
               : "memory");
#elif defined(__HIPCC__)
  struct alignas(16) Bytes {
    uint64_t halves[2];
  };
  *static_cast<Bytes*>(shared) = there ? *static_cast<const Bytes*>(global) : Bytes{};
#else
  simulator::copy_later(shared, there ? global : nullptr, 16);
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
#elif defined(__HIPCC__)
  *shared = there ? *global : 0.0f;
#else
  simulator::copy_later(shared, there ? global : nullptr, sizeof(float));
#endif
}

// What was begun since the last call becomes one group.
ORTRAIN_DEVICE void end_copy_group() {
#if defined(__CUDACC__) && !defined(__HIPCC__)
  asm volatile("cp.async.commit_group;" : : : "memory");
#elif !defined(__HIPCC__)
  simulator::end_copy_group();
#endif
}

// Until at most the kLeft groups begun last are not done.
template <int kLeft>
ORTRAIN_DEVICE void wait_for_copies() {
#if defined(__CUDACC__) && !defined(__HIPCC__)
  asm volatile("cp.async.wait_group %0;" : : "n"(kLeft) : "memory");
#elif !defined(__HIPCC__)
  simulator::wait_for_copies(kLeft);
#endif
}

}  // namespace ortrain::gpu
