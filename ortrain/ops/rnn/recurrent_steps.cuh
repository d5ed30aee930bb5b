// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/ops/rnn/recurrent_cells.cuh"

// One step of a recurrent layer between two matrix products, for the whole batch. Sums and what is
// carried from step to step are in the compute type.
namespace ortrain::gpu {

// body(row of the batch, hidden unit), once for each in the whole grid.
template <class Body>
ORTRAIN_DEVICE void for_each_unit(int64_t batch, int64_t hidden, const Body& body) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t b = blockIdx.y; b < batch; b += gridDim.y) {
    for (int64_t j = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; j < hidden; j += stride) {
      body(b, j);
    }
  }
}

inline LaunchShape unit_shape(int64_t batch, int64_t hidden) {
  LaunchShape shape = items(hidden, row_threads(hidden, 1, 256));
  shape.blocks_y = static_cast<unsigned>(std::min<int64_t>(batch, 65535));
  return shape;
}

// Addresses of one step; null where there is nothing.
template <class T>
struct ForwardStep {
  int64_t batch = 0, hidden = 0;
  const T *b_ih = nullptr, *b_hh = nullptr;  // [gates * hidden]
  // [batch, saved * hidden]: what the input gives to the gates, without bias, is in the first
  // blocks; then what the backward needs.
  T* saved = nullptr;
  T *y = nullptr, *cells = nullptr;  // [batch, hidden]
  T *h_n = nullptr, *c_n = nullptr;  // of the last step
};

// All steps, in the order of the layer's direction.
template <class T, class Cell>
struct ForwardSequence {
  int64_t steps = 0, batch = 0, hidden = 0;
  bool reverse = false;
  const T *w_hh = nullptr, *b_ih = nullptr, *b_hh = nullptr;
  const T *h0 = nullptr, *first_memory = nullptr;
  T *saved = nullptr, *y = nullptr, *cells = nullptr, *h_n = nullptr, *c_n = nullptr;

  // Of the k-th step.
  ORTRAIN_HOST_DEVICE int64_t position(int64_t k) const { return reverse ? steps - 1 - k : k; }
  ORTRAIN_HOST_DEVICE const T* h_before(int64_t k) const {
    return k == 0 ? h0 : y + position(k - 1) * batch * hidden;
  }
  ORTRAIN_HOST_DEVICE ForwardStep<T> step(int64_t k) const {
    const int64_t at = position(k) * batch * hidden;
    ForwardStep<T> s;
    s.batch = batch;
    s.hidden = hidden;
    s.b_ih = b_ih;
    s.b_hh = b_hh;
    s.saved = saved + at * Cell::kSaved;
    s.y = y + at;
    if (cells != nullptr) s.cells = cells + at;
    if (k + 1 == steps) {
      s.h_n = h_n;
      s.c_n = c_n;
    }
    return s;
  }
};

// Updates one number of the state; `from_h` is of its row, `memory` that before the step and then
// the one after it. Returns h.
template <class T, class Cell>
ORTRAIN_DEVICE ComputeType<T> update_unit(const Cell& cell, const ForwardStep<T>& s, int64_t b,
                                          int64_t j, const ComputeType<T>* from_h,
                                          ComputeType<T>& memory) {
  using C = ComputeType<T>;
  T* const kept = s.saved + b * Cell::kSaved * s.hidden + j;
  const int64_t at = b * s.hidden + j;
  C x[Cell::kGates], m[Cell::kGates], saved[Cell::kSaved];
  ORTRAIN_UNROLL
  for (int g = 0; g < Cell::kGates; ++g) {
    const int64_t unit = g * s.hidden + j;
    x[g] = static_cast<C>(kept[g * s.hidden]);
    m[g] = from_h[unit];
    if (s.b_ih != nullptr) x[g] += static_cast<C>(s.b_ih[unit]);
    if (s.b_hh != nullptr) m[g] += static_cast<C>(s.b_hh[unit]);
  }
  const C h = cell.forward(x, m, memory, saved);
  ORTRAIN_UNROLL
  for (int k = 0; k < Cell::kSaved; ++k) kept[k * s.hidden] = static_cast<T>(saved[k]);
  s.y[at] = static_cast<T>(h);
  if (s.h_n != nullptr) s.h_n[at] = static_cast<T>(h);
  if constexpr (Cell::kStates == 2) {
    if (s.cells != nullptr) s.cells[at] = static_cast<T>(memory);
    if (s.c_n != nullptr) s.c_n[at] = static_cast<T>(memory);
  }
  return h;
}

// from_h[batch, gates * hidden]; first_memory: of the first step, later ones have it in memory.
template <class T, class Cell>
__global__ void __launch_bounds__(256)
    recurrent_forward(Cell cell, ForwardStep<T> s, const ComputeType<T>* from_h,
                      const T* first_memory, ComputeType<T>* memory) {
  using C = ComputeType<T>;
  for_each_unit(s.batch, s.hidden, [&](int64_t b, int64_t j) {
    const int64_t at = b * s.hidden + j;
    C carried = 0;
    if constexpr (Cell::kMemory) {
      carried = first_memory != nullptr ? static_cast<C>(first_memory[at]) : memory[at];
    }
    update_unit(cell, s, b, j, from_h + b * Cell::kGates * s.hidden, carried);
    if constexpr (Cell::kMemory) memory[at] = carried;
  });
}

template <class T>
struct BackwardStep {
  int64_t batch = 0, hidden = 0;
  const T* saved = nullptr;  // [batch, saved * hidden]; below [batch, hidden]
  const T *memory_before = nullptr, *memory_after = nullptr;
  const T* dy = nullptr;
  const T *dh_n = nullptr, *dc_n = nullptr;  // of the last step
  // [batch, gates * hidden], of what x and h give to the gates; the second only where they differ
  T *dgates_x = nullptr, *dgates_h = nullptr;
};

template <class T, class Cell>
struct BackwardSequence {
  int64_t steps = 0, batch = 0, hidden = 0;
  bool reverse = false;
  const T* w_hh = nullptr;
  const T *saved = nullptr, *memory = nullptr, *first_memory = nullptr;
  const T *dy = nullptr, *dh_n = nullptr, *dc_n = nullptr;
  T *dgates_x = nullptr, *dgates_h = nullptr, *dh0 = nullptr, *dc0 = nullptr;

  ORTRAIN_HOST_DEVICE int64_t position(int64_t k) const { return reverse ? steps - 1 - k : k; }
  ORTRAIN_HOST_DEVICE BackwardStep<T> step(int64_t k) const {
    const int64_t state = batch * hidden, at = position(k) * state;
    BackwardStep<T> s;
    s.batch = batch;
    s.hidden = hidden;
    s.saved = saved + at * Cell::kSaved;
    s.memory_before = k == 0 ? first_memory : memory + position(k - 1) * state;
    s.memory_after = memory + at;
    if (dy != nullptr) s.dy = dy + at;
    if (k + 1 == steps) {
      s.dh_n = dh_n;
      s.dc_n = dc_n;
    }
    s.dgates_x = dgates_x + at * Cell::kGates;
    s.dgates_h = dgates_h + at * Cell::kGates;
    return s;
  }
};

// The gradients of one number of the state: `dh` and `d_memory` come from the step behind; the
// latter becomes that of the memory before the step. dm gets those of what h gives to the gates.
template <class T, class Cell>
ORTRAIN_DEVICE void differentiate_unit(const Cell& cell, const BackwardStep<T>& s, int64_t b,
                                       int64_t j, ComputeType<T> dh, ComputeType<T>& d_memory,
                                       ComputeType<T> (&dm)[Cell::kGates]) {
  using C = ComputeType<T>;
  const T* const kept = s.saved + b * Cell::kSaved * s.hidden + j;
  const int64_t at = b * s.hidden + j;
  C saved[Cell::kSaved], dx[Cell::kGates];
  ORTRAIN_UNROLL
  for (int k = 0; k < Cell::kSaved; ++k) saved[k] = static_cast<C>(kept[k * s.hidden]);
  C before = 0, after = 0;
  if (s.dh_n != nullptr) dh += static_cast<C>(s.dh_n[at]);
  if (s.dy != nullptr) dh += static_cast<C>(s.dy[at]);
  if constexpr (Cell::kMemory) {
    if (s.dc_n != nullptr) d_memory += static_cast<C>(s.dc_n[at]);
    before = static_cast<C>(s.memory_before[at]);
  }
  if constexpr (Cell::kStates == 2) after = static_cast<C>(s.memory_after[at]);
  cell.backward(saved, before, after, dh, d_memory, dx, dm);
  ORTRAIN_UNROLL
  for (int g = 0; g < Cell::kGates; ++g) {
    const int64_t to = (b * Cell::kGates + g) * s.hidden + j;
    s.dgates_x[to] = static_cast<T>(dx[g]);
    if constexpr (Cell::kOneGradient) {
      dm[g] = dx[g];
    } else {
      s.dgates_h[to] = static_cast<T>(dm[g]);
    }
  }
}

// [batch, hidden] of the step behind: dh and d_memory; is_last: there is none.
template <class T, class Cell>
__global__ void __launch_bounds__(256)
    recurrent_backward(Cell cell, BackwardStep<T> s, bool is_last, const ComputeType<T>* dh,
                       ComputeType<T>* d_memory) {
  using C = ComputeType<T>;
  for_each_unit(s.batch, s.hidden, [&](int64_t b, int64_t j) {
    const int64_t at = b * s.hidden + j;
    C carried = 0, dm[Cell::kGates];
    if constexpr (Cell::kMemory) {
      if (!is_last) carried = d_memory[at];
    }
    differentiate_unit(cell, s, b, j, is_last ? C{0} : dh[at], carried, dm);
    if constexpr (Cell::kMemory) d_memory[at] = carried;
  });
}

// out = the sum of those that are there.
template <class T>
__global__ void __launch_bounds__(kItemThreads)
    sum_states(int64_t count, const ComputeType<T>* a, const ComputeType<T>* b, const T* c,
               T* out) {
  using C = ComputeType<T>;
  for_each_item(count, [&](int64_t i) {
    C sum = 0;
    if (a != nullptr) sum += a[i];
    if (b != nullptr) sum += b[i];
    if (c != nullptr) sum += static_cast<C>(c[i]);
    out[i] = static_cast<T>(sum);
  });
}

}  // namespace ortrain::gpu
