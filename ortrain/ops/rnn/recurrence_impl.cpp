// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/rnn/recurrence_impl.h"

#include <array>

#include "ortrain/cpu/gemm.h"

namespace ortrain::cpu {
namespace {

template <typename C>
void project_inputs_of(const Recurrence& r, int64_t width, const C* x, const C* w_ih, const C* bias,
                       C* out) {
  gemm(false, true, r.steps * r.batch, width, r.input, C(1), x, r.input, w_ih, r.input, C(0), out,
       width, bias);
}

template <typename C>
void project_state_of(const Recurrence& r, int64_t width, const C* h, const C* w_hh, const C* bias,
                      bool add, C* out) {
  gemm(false, true, r.batch, width, r.hidden, C(1), h, r.hidden, w_hh, r.hidden, add ? C(1) : C(0),
       out, width, bias);
}

template <typename C>
void state_gradient_of(const Recurrence& r, int64_t width, const C* dgates, const C* w_hh, bool add,
                       C* dh) {
  gemm(false, false, r.batch, r.hidden, width, C(1), dgates, width, w_hh, r.hidden,
       add ? C(1) : C(0), dh, r.hidden);
}

// sums[j] = sum over rows of a[row, j], in double and in the order of the rows.
template <typename C>
void column_sums(int64_t rows, int64_t width, const C* a, C* sums) {
  constexpr int64_t kBlock = 32;
  const int64_t blocks = (width + kBlock - 1) / kBlock;
  const int64_t grain = std::max<int64_t>(1, 1024 / std::max<int64_t>(1, rows));
  parallel_for(blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock, count = std::min(kBlock, width - first);
      std::array<double, kBlock> total{};
      for (int64_t row = 0; row < rows; ++row) {
        const C* values = a + row * width + first;
        for (int64_t j = 0; j < count; ++j) total[j] += static_cast<double>(values[j]);
      }
      for (int64_t j = 0; j < count; ++j) sums[first + j] = static_cast<C>(total[j]);
    }
  });
}

// dw = sum over steps of dgates^T * (state before the step): h0 first, then y one step behind.
template <typename C>
void recurrent_weight_gradient(const Recurrence& r, int64_t width, const C* dgates, const C* h0,
                               const C* y, C* dw) {
  if (r.steps == 0) {
    std::fill_n(dw, width * r.hidden, C(0));
    return;
  }
  gemm(true, false, width, r.hidden, r.batch, C(1), dgates + r.step(0) * r.batch * width, width, h0,
       r.hidden, C(0), dw, r.hidden);
  if (r.steps == 1) return;
  const C* later_gates = r.reverse ? dgates : dgates + r.batch * width;
  const C* earlier_states = r.reverse ? y + r.state() : y;
  gemm(true, false, width, r.hidden, (r.steps - 1) * r.batch, C(1), later_gates, width,
       earlier_states, r.hidden, C(1), dw, r.hidden);
}

template <typename C>
void sequence_gradients_of(const Recurrence& r, const SequenceGradients<C>& g) {
  const int64_t rows = r.steps * r.batch;
  if (g.dx) {
    gemm(false, false, rows, r.input, g.width, C(1), g.dgates_input, g.width, g.w_ih, r.input, C(0),
         g.dx, r.input);
  }
  if (g.dw_ih) {
    gemm(true, false, g.width, r.input, rows, C(1), g.dgates_input, g.width, g.x, r.input, C(0),
         g.dw_ih, r.input);
  }
  if (g.dw_hh) recurrent_weight_gradient(r, g.width, g.dgates_state, g.h0, g.y, g.dw_hh);
  if (g.db_ih) column_sums(rows, g.width, g.dgates_input, g.db_ih);
  if (g.db_hh) column_sums(rows, g.width, g.dgates_state, g.db_hh);
}

}  // namespace

void project_inputs(const Recurrence& r, int64_t width, const float* x, const float* w_ih,
                    const float* bias, float* out) {
  project_inputs_of(r, width, x, w_ih, bias, out);
}
void project_inputs(const Recurrence& r, int64_t width, const double* x, const double* w_ih,
                    const double* bias, double* out) {
  project_inputs_of(r, width, x, w_ih, bias, out);
}

void project_state(const Recurrence& r, int64_t width, const float* h, const float* w_hh,
                   const float* bias, bool add, float* out) {
  project_state_of(r, width, h, w_hh, bias, add, out);
}
void project_state(const Recurrence& r, int64_t width, const double* h, const double* w_hh,
                   const double* bias, bool add, double* out) {
  project_state_of(r, width, h, w_hh, bias, add, out);
}

void state_gradient(const Recurrence& r, int64_t width, const float* dgates, const float* w_hh,
                    bool add, float* dh) {
  state_gradient_of(r, width, dgates, w_hh, add, dh);
}
void state_gradient(const Recurrence& r, int64_t width, const double* dgates, const double* w_hh,
                    bool add, double* dh) {
  state_gradient_of(r, width, dgates, w_hh, add, dh);
}

void sequence_gradients(const Recurrence& r, const SequenceGradients<float>& g) {
  sequence_gradients_of(r, g);
}
void sequence_gradients(const Recurrence& r, const SequenceGradients<double>& g) {
  sequence_gradients_of(r, g);
}

}  // namespace ortrain::cpu
