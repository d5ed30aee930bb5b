// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "ortrain/cpu/simd/vector_math.h"
#include "ortrain/ops/rnn/recurrence_impl.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

// Gates of one step and batch row: [i f g o], each `hidden` long.
enum Forward { kX, kH0, kC0, kWih, kWhh, kBih, kBhh };
enum Outputs { kY, kHn, kCn, kGates, kCells };

// Activates the gates of one step in place and makes the next cell and state.
template <typename C>
void lstm_step(const Recurrence& r, C* gates, const C* c_before, C* c, C* h) {
  const int64_t n = r.hidden;
  parallel_for(r.batch, row_grain(r), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      C* row = gates + b * 4 * n;
      vector_sigmoid(row, row, 2 * n);
      vector_tanh(row + 2 * n, row + 2 * n, n);
      vector_sigmoid(row + 3 * n, row + 3 * n, n);
      const C* before = c_before + b * n;
      C *cell = c + b * n, *state = h + b * n;
      for (int64_t j = 0; j < n; ++j) cell[j] = row[n + j] * before[j] + row[j] * row[2 * n + j];
      vector_tanh(cell, state, n);
      for (int64_t j = 0; j < n; ++j) state[j] *= row[3 * n + j];
    }
  });
}

template <typename T>
KernelFn make_lstm(NodeSpec& spec) {
  using C = ComputeType<T>;
  const Recurrence r = recurrence_of(spec, kX, kH0);
  const int64_t width = 4 * r.hidden;
  Staging<T> staging(spec);
  staging.require_output(kY, r.steps * r.state());
  staging.require_output(kGates, r.steps * r.batch * width);
  staging.require_output(kCells, r.steps * r.state());
  const size_t bias_slot = staging.add_scratch(width);
  staging.request(spec);

  return [=, staging = std::move(staging)](const KernelArgs& args) {
    staging.load(args);
    const auto in = [&](size_t i) { return staging.input(args, i); };
    C *y = staging.output(args, kY), *gates = staging.output(args, kGates);
    C* cells = staging.output(args, kCells);
    C* bias = staging.scratch(args, bias_slot);
    const C *b_ih = in(kBih), *b_hh = in(kBhh);
    for (int64_t j = 0; j < width; ++j) bias[j] = (b_ih ? b_ih[j] : C(0)) + (b_hh ? b_hh[j] : C(0));

    project_inputs(r, width, in(kX), in(kWih), bias, gates);
    const C *h = in(kH0), *c = in(kC0);
    for (int64_t k = 0; k < r.steps; ++k) {
      const int64_t t = r.step(k);
      C* step_gates = gates + t * r.batch * width;
      project_state(r, width, h, in(kWhh), static_cast<const C*>(nullptr), true, step_gates);
      lstm_step(r, step_gates, c, cells + t * r.state(), y + t * r.state());
      h = y + t * r.state();
      c = cells + t * r.state();
    }
    if (C* h_n = staging.output(args, kHn)) std::copy_n(h, r.state(), h_n);
    if (C* c_n = staging.output(args, kCn)) std::copy_n(c, r.state(), c_n);
    staging.store(args);
  };
}

enum GradInputs { kDy, kDhn, kDcn, kGx, kGh0, kGc0, kGwih, kGwhh, kGy, kGgates, kGcells };
enum GradOutputs { kDx, kDh0, kDc0, kDwih, kDwhh, kDb };

// dh, dc: gradients of the state and cell after the step. Makes those of the gates' inputs, and in
// dc that of the cell before the step.
template <typename C>
void lstm_step_grad(const Recurrence& r, const C* gates, const C* c_before, const C* c, const C* dy,
                    const C* dh, C* dc, C* dgates, C* tanh_c) {
  const int64_t n = r.hidden;
  parallel_for(r.batch, row_grain(r), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const C* g = gates + b * 4 * n;
      C* d = dgates + b * 4 * n;
      C* squashed = tanh_c + b * n;
      vector_tanh(c + b * n, squashed, n);
      for (int64_t j = 0; j < n; ++j) {
        const int64_t at = b * n + j;
        const C i = g[j], f = g[n + j], candidate = g[2 * n + j], o = g[3 * n + j];
        const C state = dh[at] + (dy ? dy[at] : C(0));
        const C cell = dc[at] + state * o * (C(1) - squashed[j] * squashed[j]);
        d[j] = cell * candidate * i * (C(1) - i);
        d[n + j] = cell * c_before[at] * f * (C(1) - f);
        d[2 * n + j] = cell * i * (C(1) - candidate * candidate);
        d[3 * n + j] = state * squashed[j] * o * (C(1) - o);
        dc[at] = cell * f;
      }
    }
  });
}

template <typename C>
void copy_or_zero(const C* from, int64_t count, C* to) {
  if (from) {
    std::copy_n(from, count, to);
  } else {
    std::fill_n(to, count, C(0));
  }
}

template <typename T>
KernelFn make_lstm_grad(NodeSpec& spec) {
  using C = ComputeType<T>;
  const Recurrence r = recurrence_of(spec, kGx, kGh0);
  const int64_t width = 4 * r.hidden;
  Staging<T> staging(spec);
  staging.require_output(kDh0, r.state());
  staging.require_output(kDc0, r.state());
  const size_t dgates_slot = staging.add_scratch(r.steps * r.batch * width);
  const size_t tanh_slot = staging.add_scratch(r.state());
  staging.request(spec);

  return [=, staging = std::move(staging)](const KernelArgs& args) {
    staging.load(args);
    const auto in = [&](size_t i) { return staging.input(args, i); };
    C *dh = staging.output(args, kDh0), *dc = staging.output(args, kDc0);
    C* dgates = staging.scratch(args, dgates_slot);
    const C *gates = in(kGgates), *cells = in(kGcells), *dy = in(kDy);
    copy_or_zero(in(kDhn), r.state(), dh);
    copy_or_zero(in(kDcn), r.state(), dc);
    for (int64_t k = r.steps_with_state(); k-- > 0;) {
      const int64_t t = r.step(k), at = t * r.state();
      const C* c_before = k == 0 ? in(kGc0) : cells + r.step(k - 1) * r.state();
      C* step_dgates = dgates + t * r.batch * width;
      lstm_step_grad(r, gates + t * r.batch * width, c_before, cells + at, dy ? dy + at : dy, dh,
                     dc, step_dgates, staging.scratch(args, tanh_slot));
      state_gradient(r, width, step_dgates, in(kGwhh), false, dh);
    }
    sequence_gradients(r, SequenceGradients<C>{.width = width,
                                               .x = in(kGx),
                                               .h0 = in(kGh0),
                                               .y = in(kGy),
                                               .w_ih = in(kGwih),
                                               .dgates_input = dgates,
                                               .dgates_state = dgates,
                                               .dx = staging.output(args, kDx),
                                               .dw_ih = staging.output(args, kDwih),
                                               .dw_hh = staging.output(args, kDwhh),
                                               .db_ih = staging.output(args, kDb),
                                               .db_hh = nullptr});
    staging.store(args);
  };
}

}  // namespace

void register_lstm(KernelRegistry& registry) {
  registry.add("ortrain::LSTM", {{.name = "ref", .make = [](NodeSpec& spec) {
                                    return dispatch_float(
                                        spec.input(kX).dtype,
                                        [&]<typename T>(TypeTag<T>) { return make_lstm<T>(spec); });
                                  }}});
  registry.add("ortrain::LSTMGrad", {{.name = "ref", .make = [](NodeSpec& spec) {
                                        return dispatch_float(spec.input(kGx).dtype,
                                                              [&]<typename T>(TypeTag<T>) {
                                                                return make_lstm_grad<T>(spec);
                                                              });
                                      }}});
}

}  // namespace ortrain::cpu
