// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>
#include <type_traits>

#include "ortrain/gpu/gpu_device.h"
#include "ortrain/ops/rnn/recurrence.h"
#include "ortrain/ops/rnn/recurrent_steps.cuh"

// All steps of a recurrent layer in one launch, where w_hh fits into the shared memory of a block:
// a block has some rows of the batch from the first step to the last. The state and its gradient
// stay in the compute type.
namespace ortrain::gpu {

inline constexpr int kMostSequenceRows = 4;  // of a block

// Shared memory: what is carried [rows, hidden] twice, sums [rows, gates * hidden], w_hh.
template <class T, class Cell>
size_t sequence_bytes(int64_t rows, int64_t hidden) {
  const int64_t width = Cell::kGates * hidden;
  return static_cast<size_t>(rows * (2 * hidden + 2 * width)) * sizeof(ComputeType<T>) +
         static_cast<size_t>(hidden * width) * sizeof(T);
}

template <class T, class Cell, int kRows>
struct SequenceMemory {
  using C = ComputeType<T>;
  int hidden, width;
  C *state, *memory;  // [kRows, hidden]
  C *sums, *gates;    // [kRows, width]
  T* weights;

  explicit ORTRAIN_DEVICE SequenceMemory(int64_t size)
      : hidden(static_cast<int>(size)), width(Cell::kGates * hidden) {
    state = dynamic_shared<C>();
    memory = state + kRows * hidden;
    sums = memory + kRows * hidden;
    gates = sums + kRows * width;
    weights = reinterpret_cast<T*>(gates + kRows * width);
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
    own.state[i] = there ? static_cast<C>(s.h0[at]) : C{0};
    own.memory[i] = there && Cell::kMemory ? static_cast<C>(s.first_memory[at]) : C{0};
  });
  __syncthreads();
  for (int64_t k = 0; k < s.steps; ++k) {
    own.each_column([&](int u) {
      C sum[kRows] = {};
      for (int i = 0; i < own.hidden; ++i) {
        const C weight = static_cast<C>(own.weights[i * own.width + u]);
        ORTRAIN_UNROLL
        for (int row = 0; row < kRows; ++row) sum[row] += own.state[row * own.hidden + i] * weight;
      }
      ORTRAIN_UNROLL
      for (int row = 0; row < kRows; ++row) own.sums[row * own.width + u] = sum[row];
    });
    __syncthreads();
    const ForwardStep<T> step = s.step(k);
    own.each_unit([&](int row, int j, int i) {
      if (first_row + row >= s.batch) return;
      own.state[i] =
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
  own.each_unit([&](int, int, int i) { own.memory[i] = C{0}; });
  own.each_column([&](int u) {
    for (int row = 0; row < kRows; ++row) {
      own.sums[row * own.width + u] = own.gates[row * own.width + u] = C{0};
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
        own.gates[row * own.width + g * own.hidden + j] = dm[g];
      }
    });
    __syncthreads();
    own.each_column([&](int u) {
      const int j = u % own.hidden, gate = u - j;
      C sum[kRows] = {};
      for (int i = 0; i < own.hidden; ++i) {
        const C weight = static_cast<C>(own.weights[(gate + i) * own.hidden + j]);
        ORTRAIN_UNROLL
        for (int row = 0; row < kRows; ++row) {
          sum[row] += own.gates[row * own.width + gate + i] * weight;
        }
      }
      ORTRAIN_UNROLL
      for (int row = 0; row < kRows; ++row) own.sums[row * own.width + u] = sum[row];
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
