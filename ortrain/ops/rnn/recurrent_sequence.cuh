// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>
#include <type_traits>

#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/words.h"
#include "ortrain/ops/rnn/recurrence.h"
#include "ortrain/ops/rnn/recurrent_steps.cuh"

// All steps of a recurrent layer in one launch, where w_hh fits into the shared memory of a block:
// a block has some rows of the batch from the first step to the last. The state and its gradient
// stay in the compute type.
namespace ortrain::gpu {

inline constexpr int kMostSequenceRows = 4;  // of a block

// Numbers of a state that a thread reads at a time.
template <class C>
inline constexpr int kStatePack = 16 / static_cast<int>(sizeof(C));

template <class C>
ORTRAIN_HOST_DEVICE int64_t padded_state(int64_t hidden) {
  return (hidden + kStatePack<C> - 1) / kStatePack<C> * kStatePack<C>;
}

// Shared memory, as SequenceMemory divides it.
template <class T, class Cell>
size_t sequence_bytes(int64_t rows, int64_t hidden) {
  using C = ComputeType<T>;
  const int64_t numbers = (1 + Cell::kGates) * (padded_state<C>(hidden) + hidden);
  return (bytes_of<C>(rows, numbers) + bytes_of<T>(Cell::kGates, hidden, hidden)).value();
}

template <class T, class Cell, int kRows>
struct SequenceMemory {
  using C = ComputeType<T>;
  int hidden, padded, width;
  C* state;   // [kRows, padded]
  C* gates;   // [kRows, gates, padded]
  C* memory;  // [kRows, hidden]
  C* sums;    // [kRows, width]
  T* weights;

  explicit ORTRAIN_DEVICE SequenceMemory(int64_t size)
      : hidden(static_cast<int>(size)),
        padded(static_cast<int>(padded_state<C>(size))),
        width(Cell::kGates * hidden) {
    state = dynamic_shared<C>();
    gates = state + kRows * padded;
    memory = gates + kRows * Cell::kGates * padded;
    sums = memory + kRows * hidden;
    weights = reinterpret_cast<T*>(sums + kRows * width);
  }
  // For each row: the sum over i < hidden of vectors[row * stride + i] * w[i * w_stride], to
  // sums[row, u].
  ORTRAIN_DEVICE void multiply(const C* vectors, int stride, const T* w, int w_stride,
                               int u) const {
    constexpr int kPack = kStatePack<C>;
    C sum[kRows] = {};
    int i = 0;
    for (; i + kPack <= hidden; i += kPack) {
      C weight[kPack];
      ORTRAIN_UNROLL
      for (int v = 0; v < kPack; ++v) weight[v] = static_cast<C>(w[(i + v) * w_stride]);
      ORTRAIN_UNROLL
      for (int row = 0; row < kRows; ++row) {
        const auto x = load_vector<kPack>(vectors + row * stride + i);
        ORTRAIN_UNROLL
        for (int v = 0; v < kPack; ++v) sum[row] += x[v] * weight[v];
      }
    }
    for (; i < hidden; ++i) {
      const C weight = static_cast<C>(w[i * w_stride]);
      ORTRAIN_UNROLL
      for (int row = 0; row < kRows; ++row) sum[row] += vectors[row * stride + i] * weight;
    }
    ORTRAIN_UNROLL
    for (int row = 0; row < kRows; ++row) sums[row * width + u] = sum[row];
  }
  // body(row, hidden unit, their place in [kRows, hidden]) for those of this thread.
  template <class Body>
  ORTRAIN_DEVICE void each_unit(const Body& body) const {
    for (int i = static_cast<int>(threadIdx.x); i < kRows * hidden;
         i += static_cast<int>(blockDim.x)) {
      body(i / hidden, i % hidden, i);
    }
  }
  // body(column) for those of [width] of this thread.
  template <class Body>
  ORTRAIN_DEVICE void each_column(const Body& body) const {
    for (int u = static_cast<int>(threadIdx.x); u < width; u += static_cast<int>(blockDim.x)) {
      body(u);
    }
  }
};

// Block x: rows kRows * x and on.
template <class T, class Cell, int kRows>
__global__ void __launch_bounds__(1024)
    recurrent_forward_sequence(Cell cell, ForwardSequence<T, Cell> s) {
  using C = ComputeType<T>;
  const SequenceMemory<T, Cell, kRows> own(s.hidden);
  const int64_t first_row = int64_t{blockIdx.x} * kRows;
  // Transposed: neighbouring threads have neighbouring gates.
  own.each_column([&](int u) {
    for (int i = 0; i < own.hidden; ++i) {
      own.weights[i * own.width + u] = s.w_hh[int64_t{u} * own.hidden + i];
    }
  });
  own.each_unit([&](int row, int j, int i) {
    const int64_t at = (first_row + row) * s.hidden + j;
    const bool there = first_row + row < s.batch;
    own.state[row * own.padded + j] = there ? static_cast<C>(s.h0[at]) : C{0};
    own.memory[i] = there && Cell::kMemory ? static_cast<C>(s.first_memory[at]) : C{0};
  });
  __syncthreads();
  for (int64_t k = 0; k < s.steps; ++k) {
    own.each_column(
        [&](int u) { own.multiply(own.state, own.padded, own.weights + u, own.width, u); });
    __syncthreads();
    const ForwardStep<T> step = s.step(k);
    own.each_unit([&](int row, int j, int i) {
      if (first_row + row >= s.batch) return;
      own.state[row * own.padded + j] =
          update_unit(cell, step, first_row + row, j, own.sums + row * own.width, own.memory[i]);
    });
    __syncthreads();
  }
}

template <class T, class Cell, int kRows>
__global__ void __launch_bounds__(1024)
    recurrent_backward_sequence(Cell cell, BackwardSequence<T, Cell> s) {
  using C = ComputeType<T>;
  const SequenceMemory<T, Cell, kRows> own(s.hidden);
  const int64_t first_row = int64_t{blockIdx.x} * kRows;
  for (int i = static_cast<int>(threadIdx.x); i < own.width * own.hidden;
       i += static_cast<int>(blockDim.x)) {
    own.weights[i] = s.w_hh[i];
  }
  own.each_unit([&](int row, int j, int i) {
    own.memory[i] = C{0};
    for (int g = 0; g < Cell::kGates; ++g) {
      own.sums[row * own.width + g * own.hidden + j] = C{0};
      own.gates[(row * Cell::kGates + g) * own.padded + j] = C{0};
    }
  });
  __syncthreads();
  // A thread sums over the units of one gate; the gates are summed here.
  const auto gradient_of_state = [&](int row, int j) {
    C sum = 0;
    ORTRAIN_UNROLL
    for (int g = 0; g < Cell::kGates; ++g) {
      sum += own.sums[row * own.width + g * own.hidden + j];
    }
    return sum;
  };
  for (int64_t k = s.steps; k-- > 0;) {
    const BackwardStep<T> step = s.step(k);
    own.each_unit([&](int row, int j, int i) {
      if (first_row + row >= s.batch) return;
      C dm[Cell::kGates];
      differentiate_unit(cell, step, first_row + row, j, gradient_of_state(row, j), own.memory[i],
                         dm);
      ORTRAIN_UNROLL
      for (int g = 0; g < Cell::kGates; ++g) {
        own.gates[(row * Cell::kGates + g) * own.padded + j] = dm[g];
      }
    });
    __syncthreads();
    own.each_column([&](int u) {
      const int gate = u / own.hidden, j = u % own.hidden;
      own.multiply(own.gates + gate * own.padded, Cell::kGates * own.padded,
                   own.weights + gate * own.hidden * own.hidden + j, own.hidden, u);
    });
    __syncthreads();
  }
  own.each_unit([&](int row, int j, int i) {
    const int64_t at = (first_row + row) * s.hidden + j;
    if (first_row + row >= s.batch) return;
    if (s.dh0 != nullptr) {
      const C direct = Cell::kMemoryIsState ? own.memory[i] : C{0};
      s.dh0[at] = static_cast<T>(gradient_of_state(row, j) + direct);
    }
    if (s.dc0 != nullptr) s.dc0[at] = static_cast<T>(own.memory[i]);
  });
}

// How the batch is divided among blocks that go through the whole sequence.
struct SequenceBlocks {
  int64_t rows = 1;  // of a block: 1, 2 or 4
  size_t shared_bytes = 0;
  std::string refusal;  // empty: they can be launched

  template <class T, class Cell>
  static SequenceBlocks of(const Recurrence& r) {
    constexpr int64_t kMostRounds = 4;
    const int device = current_device();
    const int64_t at_a_time = std::max(multiprocessors(device), 1);
    const auto most_bytes = static_cast<size_t>(shared_memory_per_block(device));
    SequenceBlocks blocks;
    while (blocks.rows < kMostSequenceRows && blocks.rows * at_a_time < r.batch) blocks.rows *= 2;
    const auto bytes = [&] { return sequence_bytes<T, Cell>(blocks.rows, r.hidden); };
    while (blocks.rows > 1 && bytes() > most_bytes) blocks.rows /= 2;
    blocks.shared_bytes = bytes();
    if (r.steps == 0) {
      blocks.refusal = "there are no steps";
    } else if (blocks.shared_bytes > most_bytes) {
      blocks.refusal = str("a hidden size of ", r.hidden, " takes ", blocks.shared_bytes,
                           " bytes of shared memory; a block can have ", most_bytes);
    } else if (r.batch > kMostRounds * blocks.rows * at_a_time) {
      blocks.refusal = str("a batch of ", r.batch, " rows fills the device at each step");
    }
    return blocks;
  }

  template <class Cell>
  LaunchShape shape(const Recurrence& r) const {
    const int64_t width = std::max<int64_t>(Cell::kGates * r.hidden, 1);
    const int64_t warps = std::min<int64_t>((width + kWarpSize - 1) / kWarpSize, 1024 / kWarpSize);
    return {.blocks = block_count((r.batch + rows - 1) / rows),
            .threads = static_cast<unsigned>(warps * kWarpSize),
            .shared_bytes = shared_bytes};
  }
};

// Calls body(std::integral_constant<int, rows>()).
template <class Body>
void with_sequence_rows(int64_t rows, const Body& body) {
  if (rows == 1) return body(std::integral_constant<int, 1>());
  if (rows == 2) return body(std::integral_constant<int, 2>());
  body(std::integral_constant<int, kMostSequenceRows>());
}

}  // namespace ortrain::gpu
