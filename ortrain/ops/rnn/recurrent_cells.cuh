// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include "ortrain/gpu/device_code.h"

// What the LSTM, the GRU and the plain recurrent layer do with one number of the hidden state at
// one step. A cell has
//   kGates   blocks of the weights, of each of which it takes one number from both sides:
//            x from the step's input, m from the state before, both with their biases
//   kSaved   numbers that its backward needs again
//   kStates  initial states
//   kMemory  a number carried from step to step besides what w_hh multiplies: the LSTM's c, the
//            GRU's own h (kMemoryIsState)
//   kOneGradient  whether the gradients of x and of m are the same
// `backward` takes the gradient of h after the step, and of the memory after it; the latter becomes
// that of the memory before it. Formulas: ortrain/ops/rnn/rnn.cpp.
namespace ortrain::gpu {

template <class C>
ORTRAIN_DEVICE C sigmoid(C x) {
  return C(1) / (C(1) + static_cast<C>(exp(-x)));
}

struct LstmCell {
  static constexpr int kGates = 4, kSaved = 4, kStates = 2;
  static constexpr bool kMemory = true, kMemoryIsState = false, kOneGradient = true;

  // Returns h; saved: i f g o.
  template <class C>
  ORTRAIN_DEVICE C forward(const C (&x)[4], const C (&m)[4], C& memory, C (&saved)[4]) const {
    saved[0] = sigmoid(x[0] + m[0]);
    saved[1] = sigmoid(x[1] + m[1]);
    saved[2] = static_cast<C>(tanh(x[2] + m[2]));
    saved[3] = sigmoid(x[3] + m[3]);
    memory = saved[1] * memory + saved[0] * saved[2];
    return saved[3] * static_cast<C>(tanh(memory));
  }
  template <class C>
  ORTRAIN_DEVICE void backward(const C (&saved)[4], C before, C after, C dh, C& d_memory,
                               C (&dx)[4], C (&)[4]) const {
    const C i = saved[0], f = saved[1], candidate = saved[2], o = saved[3];
    const C squashed = static_cast<C>(tanh(after));
    const C dc = d_memory + dh * o * (C(1) - squashed * squashed);
    dx[0] = dc * candidate * i * (C(1) - i);
    dx[1] = dc * before * f * (C(1) - f);
    dx[2] = dc * i * (C(1) - candidate * candidate);
    dx[3] = dh * squashed * o * (C(1) - o);
    d_memory = dc * f;
  }
};

struct GruCell {
  static constexpr int kGates = 3, kSaved = 4, kStates = 1;
  static constexpr bool kMemory = true, kMemoryIsState = true, kOneGradient = false;

  // saved: r z n and m of n, which r multiplies.
  template <class C>
  ORTRAIN_DEVICE C forward(const C (&x)[3], const C (&m)[3], C& memory, C (&saved)[4]) const {
    const C r = sigmoid(x[0] + m[0]), z = sigmoid(x[1] + m[1]);
    const C candidate = static_cast<C>(tanh(x[2] + r * m[2]));
    saved[0] = r;
    saved[1] = z;
    saved[2] = candidate;
    saved[3] = m[2];
    memory = (C(1) - z) * candidate + z * memory;
    return memory;
  }
  template <class C>
  ORTRAIN_DEVICE void backward(const C (&saved)[4], C before, C, C dh, C& d_memory, C (&dx)[3],
                               C (&dm)[3]) const {
    const C r = saved[0], z = saved[1], candidate = saved[2];
    const C d = dh + d_memory;
    dx[2] = d * (C(1) - z) * (C(1) - candidate * candidate);
    dx[0] = dm[0] = dx[2] * saved[3] * r * (C(1) - r);
    dx[1] = dm[1] = d * (before - candidate) * z * (C(1) - z);
    dm[2] = dx[2] * r;
    d_memory = d * z;
  }
};

struct PlainCell {
  static constexpr int kGates = 1, kSaved = 1, kStates = 1;
  static constexpr bool kMemory = false, kMemoryIsState = false, kOneGradient = true;
  bool relu = false;

  // saved: h.
  template <class C>
  ORTRAIN_DEVICE C forward(const C (&x)[1], const C (&m)[1], C&, C (&saved)[1]) const {
    const C sum = x[0] + m[0];
    if (relu) {
      saved[0] = sum < C(0) ? C(0) : sum;  // NaN stays
    } else {
      saved[0] = static_cast<C>(tanh(sum));
    }
    return saved[0];
  }
  template <class C>
  ORTRAIN_DEVICE void backward(const C (&saved)[1], C, C, C dh, C&, C (&dx)[1], C (&)[1]) const {
    const C h = saved[0];
    dx[0] = relu ? (h <= C(0) ? C(0) : dh) : dh * (C(1) - h * h);
  }
};

}  // namespace ortrain::gpu
