// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The one language of device code, read by three compilers:
//
//   nvcc    CUDA, with its own headers
//   hipcc   HIP for AMD
//   g++     the simulator, which runs the threads of a block one after another on the host
//
// Kernels are written in CUDA's words (__global__, threadIdx, __shared__, __syncthreads). What
// differs between the three stands here: lanes of a warp, exchange between lanes, atomics,
// launches. Rules that keep the simulator honest, and AMD's warps of 64 lanes right:
//   - all lanes of a warp take part in every exchange, all threads of a block in every barrier;
//   - a block has a multiple of kWarpSize threads;
//   - nothing is assumed to run in step without a barrier.

#include <bit>
#include <cstdint>
#include <type_traits>

#include "ortrain/base/device_code.h"
#include "ortrain/base/half.h"

#if defined(__HIPCC__)
#include <hip/hip_runtime.h>
#elif defined(__CUDACC__)
#include <cuda_runtime.h>
#else
#include "ortrain/gpu/simulator.h"
#endif

#if defined(__CUDACC__) || defined(__HIPCC__)
#define ORTRAIN_DEVICE __device__ __forceinline__
#define ORTRAIN_UNROLL _Pragma("unroll")
#define ORTRAIN_ROLL _Pragma("unroll 1")
#else
#define ORTRAIN_DEVICE inline
#define ORTRAIN_UNROLL
#define ORTRAIN_ROLL
#endif

namespace ortrain::gpu {

#if defined(__HIPCC__)
inline constexpr int kWarpSize = 64;  // gfx9
#else
inline constexpr int kWarpSize = 32;
#endif

// --- lanes

ORTRAIN_DEVICE int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }
ORTRAIN_DEVICE int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }

// The value of the lane whose number differs in the bits of `mask`.
template <class T>
ORTRAIN_DEVICE T exchange_xor(T value, int mask) {
#if defined(__HIPCC__)
  return __shfl_xor(value, mask);
#elif defined(__CUDACC__)
  return __shfl_xor_sync(0xffffffffu, value, mask);
#else
  return simulator::exchange(value, lane() ^ mask);
#endif
}

// The value of lane `source`.
template <class T>
ORTRAIN_DEVICE T broadcast_lane(T value, int source) {
#if defined(__HIPCC__)
  return __shfl(value, source);
#elif defined(__CUDACC__)
  return __shfl_sync(0xffffffffu, value, source);
#else
  return simulator::exchange(value, source);
#endif
}

// The value of the lane `distance` below; a lane below that keeps its own.
template <class T>
ORTRAIN_DEVICE T exchange_up(T value, int distance) {
#if defined(__HIPCC__)
  return __shfl_up(value, distance);
#elif defined(__CUDACC__)
  return __shfl_up_sync(0xffffffffu, value, distance);
#else
  return simulator::exchange(value, lane() >= distance ? lane() - distance : lane());
#endif
}

// A bit per lane.
#if defined(__HIPCC__)
using LaneMask = uint64_t;
#else
using LaneMask = uint32_t;
#endif

// The lanes in which it holds.
ORTRAIN_DEVICE LaneMask lanes_where(bool holds) {
#if defined(__HIPCC__)
  return __ballot(holds);
#elif defined(__CUDACC__)
  return __ballot_sync(0xffffffffu, holds);
#else
  LaneMask lanes = static_cast<LaneMask>(holds ? 1 : 0) << lane();
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) lanes |= exchange_xor(lanes, mask);
  return lanes;
#endif
}
ORTRAIN_DEVICE LaneMask lanes_below() { return (LaneMask{1} << lane()) - 1; }
ORTRAIN_DEVICE int bits_in(LaneMask lanes) {
#if defined(__HIPCC__)
  return __popcll(lanes);
#elif defined(__CUDACC__)
  return __popc(lanes);
#else
  return std::popcount(lanes);
#endif
}

// Whether it holds in any lane.
ORTRAIN_DEVICE bool any_lane(bool holds) {
#if defined(__HIPCC__)
  return __any(holds);
#elif defined(__CUDACC__)
  return __any_sync(0xffffffffu, holds);
#else
  return lanes_where(holds) != 0;
#endif
}

// Orders the memory of the lanes of a warp.
ORTRAIN_DEVICE void warp_barrier() {
#if defined(__HIPCC__)
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
#elif defined(__CUDACC__)
  __syncwarp();
#else
  simulator::warp_barrier();
#endif
}

// --- shared memory of a size that the launch gives, 16-byte aligned

template <class T>
ORTRAIN_DEVICE T* dynamic_shared() {
#if defined(__HIPCC__)
  extern __shared__ __attribute__((aligned(16))) unsigned char ortrain_shared_bytes[];
  return reinterpret_cast<T*>(ortrain_shared_bytes);
#elif defined(__CUDACC__)
  extern __shared__ __align__(16) unsigned char ortrain_shared_bytes[];
  return reinterpret_cast<T*>(ortrain_shared_bytes);
#else
  return reinterpret_cast<T*>(simulator::dynamic_shared());
#endif
}

// --- atomics: on float, double, int32, uint32, uint64 (add); int32, uint32, int64, uint64 (others)

template <class T>
ORTRAIN_DEVICE T atomic_add(T* address, T value) {
#if defined(__CUDACC__) || defined(__HIPCC__)
  return atomicAdd(address, value);
#else
  return simulator::atomic_add(address, value);
#endif
}

template <class T>
ORTRAIN_DEVICE T atomic_max(T* address, T value) {
#if defined(__CUDACC__) || defined(__HIPCC__)
  return atomicMax(address, value);
#else
  return simulator::atomic_update(address, value, [](T a, T b) { return a < b ? b : a; });
#endif
}

template <class T>
ORTRAIN_DEVICE T atomic_min(T* address, T value) {
#if defined(__CUDACC__) || defined(__HIPCC__)
  return atomicMin(address, value);
#else
  return simulator::atomic_update(address, value, [](T a, T b) { return b < a ? b : a; });
#endif
}

// Returns what was there; the value is `desired` now if that was `expected`.
template <class T>
ORTRAIN_DEVICE T atomic_compare_exchange(T* address, T expected, T desired) {
#if defined(__CUDACC__) || defined(__HIPCC__)
  return atomicCAS(address, expected, desired);
#else
  return simulator::atomic_compare_exchange(address, expected, desired);
#endif
}

// Returns what was there; the value is `desired` now.
template <class T>
ORTRAIN_DEVICE T atomic_exchange(T* address, T desired) {
#if defined(__CUDACC__) || defined(__HIPCC__)
  return atomicExch(address, desired);
#else
  return simulator::atomic_update(address, desired, [](T, T b) { return b; });
#endif
}

// Writes before it are seen by the host and by other devices before writes after it.
ORTRAIN_DEVICE void system_fence() {
#if defined(__CUDACC__) || defined(__HIPCC__)
  __threadfence_system();
#else
  simulator::fence();
#endif
}

// Writes before it are seen by other blocks before writes after it.
ORTRAIN_DEVICE void device_fence() {
#if defined(__CUDACC__) || defined(__HIPCC__)
  __threadfence();
#else
  simulator::fence();
#endif
}

}  // namespace ortrain::gpu
