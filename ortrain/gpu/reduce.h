// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/gpu/device_code.h"

// Reductions over the lanes of a warp and the threads of a block. All threads take part, all get
// the result, and the order of the additions depends on the number of threads alone.
namespace ortrain::gpu {

struct Sum {
  template <class T>
  ORTRAIN_DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};
// NaN wins.
struct Max {
  template <class T>
  ORTRAIN_DEVICE T operator()(T a, T b) const {
    return a > b || a != a ? a : b;
  }
};
struct Min {
  template <class T>
  ORTRAIN_DEVICE T operator()(T a, T b) const {
    return a < b || a != a ? a : b;
  }
};

template <class T, class Op>
ORTRAIN_DEVICE T warp_reduce(T value, Op op) {
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) value = op(value, exchange_xor(value, mask));
  return value;
}

// The sum of the values of lower lanes.
template <class T>
ORTRAIN_DEVICE T sum_below(T value) {
  T sum = value;
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const T below = exchange_up(sum, distance);
    if (lane() >= distance) sum += below;
  }
  return sum - value;
}

// `none`: what changes nothing. May be called again at once.
template <class T, class Op>
ORTRAIN_DEVICE T block_reduce(T value, T none, Op op) {
  __shared__ T partial[1024 / kWarpSize];
  value = warp_reduce(value, op);
  if (static_cast<int>(blockDim.x) <= kWarpSize) return value;
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  if (lane() == 0) partial[warp()] = value;
  __syncthreads();
  value = lane() < warps ? partial[lane()] : none;
  // Blocks have up to 32 warps of 32 lanes, or 16 of 64: one more round over lanes takes them all.
  value = warp_reduce(value, op);
  __syncthreads();
  return value;
}

template <class T>
ORTRAIN_DEVICE T block_sum(T value) {
  return block_reduce(value, T{0}, Sum());
}

}  // namespace ortrain::gpu
