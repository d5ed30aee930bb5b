// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>

#include "ortrain/gpu/device_code.h"

// Reductions of states of several numbers (a maximum and where it is, a mean and a variance): what
// reduce.h does for one number. A state is trivially constructible, of whole 32-bit words, and has
// no initializers, since shared memory has none. op(a, b) joins two of them; it needs not give the
// same bits as op(b, a): all threads get the result of one of them. All threads take part.
namespace ortrain::gpu {

template <class S>
struct StateWords {
  static_assert(sizeof(S) % 4 == 0);
  uint32_t words[sizeof(S) / 4];
};

template <class S>
ORTRAIN_DEVICE S exchange_state_xor(const S& state, int mask) {
  auto from = std::bit_cast<StateWords<S>>(state);
  StateWords<S> to;
  for (int i = 0; i < static_cast<int>(sizeof(S) / 4); ++i) {
    to.words[i] = exchange_xor(from.words[i], mask);
  }
  return std::bit_cast<S>(to);
}

template <class S>
ORTRAIN_DEVICE S broadcast_state(const S& state, int source) {
  auto from = std::bit_cast<StateWords<S>>(state);
  StateWords<S> to;
  for (int i = 0; i < static_cast<int>(sizeof(S) / 4); ++i) {
    to.words[i] = broadcast_lane(from.words[i], source);
  }
  return std::bit_cast<S>(to);
}

template <class S, class Op>
ORTRAIN_DEVICE S warp_merge(S state, const Op& op) {
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
    const S other = exchange_state_xor(state, mask);
    // The lower lane's state stands in front on both sides, so that both get the same bits.
    state = (lane() & mask) == 0 ? op(state, other) : op(other, state);
  }
  return state;
}

// `none` changes nothing. May be called again at once.
template <class S, class Op>
ORTRAIN_DEVICE S block_merge(S state, const S& none, const Op& op) {
  __shared__ S partial[1024 / kWarpSize];
  state = warp_merge(state, op);
  if (static_cast<int>(blockDim.x) <= kWarpSize) return state;
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  if (lane() == 0) partial[warp()] = state;
  __syncthreads();
  state = warp_merge(lane() < warps ? partial[lane()] : none, op);
  __syncthreads();
  return state;
}

// Joins the states of the threads that have the same lane, in the order of their warps: columns
// that lie side by side along the lanes. At most kMergedWarps warps.
inline constexpr int kMergedWarps = 16;

template <class S, class Op>
ORTRAIN_DEVICE S merge_warps(const S& state, const Op& op) {
  __shared__ S partial[kMergedWarps][kWarpSize];
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  if (warps == 1) return state;
  partial[warp()][lane()] = state;
  __syncthreads();
  S total = partial[0][lane()];
  for (int w = 1; w < warps; ++w) total = op(total, partial[w][lane()]);
  __syncthreads();
  return total;
}

// Of kCount states at once, in the same order and by one exchange: calls body(i, total) for state i
// of its lane in one of the warps, of which a block has kMost at most.
template <int kMost, int kCount, class S, class Op, class Body>
ORTRAIN_DEVICE void merge_warps_of(const S (&states)[kCount], const Op& op, const Body& body) {
  __shared__ S partial[kMost][kCount][kWarpSize];
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  ORTRAIN_UNROLL
  for (int i = 0; i < kCount; ++i) partial[warp()][i][lane()] = states[i];
  __syncthreads();
  for (int i = warp(); i < kCount; i += warps) {
    S total = partial[0][i][lane()];
    for (int w = 1; w < warps; ++w) total = op(total, partial[w][i][lane()]);
    body(i, total);
  }
  __syncthreads();
}

// Two sums made together.
template <class T>
struct TwoSums {
  T first, second;
};
struct AddBoth {
  template <class T>
  ORTRAIN_DEVICE TwoSums<T> operator()(const TwoSums<T>& a, const TwoSums<T>& b) const {
    return {a.first + b.first, a.second + b.second};
  }
};

}  // namespace ortrain::gpu
