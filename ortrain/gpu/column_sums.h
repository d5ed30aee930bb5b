// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/gpu/row_forms.h"

// The second of two stages that sum over rows: parts made by many blocks, added up in an order that
// the shapes alone decide.
namespace ortrain::gpu {

inline constexpr int kSumWarps = 8;

// For each k < kOutputs with a place: out[k][j] = the sum over p of
// partial[(p * kOutputs + k) * n + j].
template <class T, int kOutputs>
__global__ void sum_parts(const ComputeType<T>* partial, int64_t parts, int64_t n,
                          DeviceArray<T*, kOutputs> out) {
  using C = ComputeType<T>;
  T* const to = out[static_cast<int>(blockIdx.y)];
  if (to == nullptr) return;
  const int64_t column = int64_t{blockIdx.x} * kWarpSize + lane();
  C sum = 0;
  if (column < n) {
    for (int64_t p = warp(); p < parts; p += blockDim.x / kWarpSize) {
      sum += partial[(p * kOutputs + blockIdx.y) * n + column];
    }
  }
  sum = merge_warps(sum, Sum());
  if (warp() == 0 && column < n) to[column] = static_cast<T>(sum);
}

template <class T, int kOutputs>
void launch_sum_parts(void* stream, const ComputeType<T>* partial, int64_t parts, int64_t n,
                      const DeviceArray<T*, kOutputs>& out) {
  launch(sum_parts<T, kOutputs>,
         {.blocks = block_count((n + kWarpSize - 1) / kWarpSize),
          .threads = kSumWarps * kWarpSize,
          .blocks_y = kOutputs},
         stream, partial, parts, n, out);
}

}  // namespace ortrain::gpu
