// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "ortrain/cpu/simd/vector_math.h"
#include "ortrain/ops/rnn/recurrence_impl.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

enum Forward { kX, kH0, kWih, kWhh, kBih, kBhh };
enum Outputs { kY, kHn, kGates };

// from_x, from_h: the gates' inputs [r z n] from both sides. `saved` gets [r z n m] where m is the
// hidden side of n before r multiplies it.
template <typename C>
void gru_step(const Recurrence& rec, const C* from_x, const C* from_h, const C* h_before, C* saved,
              C* h) {
  const int64_t n = rec.hidden;
  parallel_for(rec.batch, row_grain(rec), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const C *x = from_x + b * 3 * n, *m = from_h + b * 3 * n, *before = h_before + b * n;
      C *out = saved + b * 4 * n, *state = h + b * n;
      for (int64_t j = 0; j < 2 * n; ++j) out[j] = x[j] + m[j];
      vector_sigmoid(out, out, 2 * n);
      for (int64_t j = 0; j < n; ++j) {
        out[2 * n + j] = x[2 * n + j] + out[j] * m[2 * n + j];
        out[3 * n + j] = m[2 * n + j];
      }
      vector_tanh(out + 2 * n, out + 2 * n, n);
      for (int64_t j = 0; j < n; ++j) {
        const C z = out[n + j];
        state[j] = (C(1) - z) * out[2 * n + j] + z * before[j];
      }
    }
  });
}

template <typename T>
KernelFn make_gru(NodeSpec& spec) {
  using C = ComputeType<T>;
  const Recurrence r = recurrence_of(spec, kX, kH0);
  const int64_t width = 3 * r.hidden;
  Staging<T> staging(spec);
  staging.require_output(kY, r.steps * r.state());
  staging.require_output(kGates, r.steps * r.state() * 4);
  const size_t from_x_slot = staging.add_scratch(r.steps * r.batch * width);
  const size_t from_h_slot = staging.add_scratch(r.batch * width);
  staging.request(spec);

  return [=, staging = std::move(staging)](const KernelArgs& args) {
    staging.load(args);
    const auto in = [&](size_t i) { return staging.input(args, i); };
    C *y = staging.output(args, kY), *gates = staging.output(args, kGates);
    C *from_x = staging.scratch(args, from_x_slot), *from_h = staging.scratch(args, from_h_slot);
    project_inputs(r, width, in(kX), in(kWih), in(kBih), from_x);
    const C* h = in(kH0);
    for (int64_t k = 0; k < r.steps; ++k) {
      const int64_t t = r.step(k);
      project_state(r, width, h, in(kWhh), in(kBhh), false, from_h);
      gru_step(r, from_x + t * r.batch * width, from_h, h, gates + t * r.state() * 4,
               y + t * r.state());
      h = y + t * r.state();
    }
    if (C* h_n = staging.output(args, kHn)) std::copy_n(h, r.state(), h_n);
    staging.store(args);
  };
}

enum GradInputs { kDy, kDhn, kGx, kGh0, kGwih, kGwhh, kGy, kGgates };
enum GradOutputs { kDx, kDh0, kDwih, kDwhh, kDbih, kDbhh };

// dh: gradient of the state after the step; becomes the part of that before the step which does not
// pass through w_hh.
template <typename C>
void gru_step_grad(const Recurrence& rec, const C* saved, const C* h_before, const C* dy, C* dh,
                   C* d_from_x, C* d_from_h) {
  const int64_t n = rec.hidden;
  parallel_for(rec.batch, row_grain(rec), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const C* g = saved + b * 4 * n;
      C *dx = d_from_x + b * 3 * n, *dm = d_from_h + b * 3 * n;
      for (int64_t j = 0; j < n; ++j) {
        const int64_t at = b * n + j;
        const C r = g[j], z = g[n + j], candidate = g[2 * n + j], m = g[3 * n + j];
        const C state = dh[at] + (dy ? dy[at] : C(0));
        const C dn = state * (C(1) - z) * (C(1) - candidate * candidate);
        const C dr = dn * m * r * (C(1) - r);
        const C dz = state * (h_before[at] - candidate) * z * (C(1) - z);
        dx[j] = dm[j] = dr;
        dx[n + j] = dm[n + j] = dz;
        dx[2 * n + j] = dn;
        dm[2 * n + j] = dn * r;
        dh[at] = state * z;
      }
    }
  });
}

template <typename T>
KernelFn make_gru_grad(NodeSpec& spec) {
  using C = ComputeType<T>;
  const Recurrence r = recurrence_of(spec, kGx, kGh0);
  const int64_t width = 3 * r.hidden;
  Staging<T> staging(spec);
  staging.require_output(kDh0, r.state());
  const size_t from_x_slot = staging.add_scratch(r.steps * r.batch * width);
  const size_t from_h_slot = staging.add_scratch(r.steps * r.batch * width);
  staging.request(spec);

  return [=, staging = std::move(staging)](const KernelArgs& args) {
    staging.load(args);
    const auto in = [&](size_t i) { return staging.input(args, i); };
    C* dh = staging.output(args, kDh0);
    C* d_from_x = staging.scratch(args, from_x_slot);
    C* d_from_h = staging.scratch(args, from_h_slot);
    const C *y = in(kGy), *dy = in(kDy);
    if (const C* dh_n = in(kDhn)) {
      std::copy_n(dh_n, r.state(), dh);
    } else {
      std::fill_n(dh, r.state(), C(0));
    }
    for (int64_t k = r.steps_with_state(); k-- > 0;) {
      const int64_t t = r.step(k), at = t * r.state(), gates_at = t * r.batch * width;
      const C* h_before = k == 0 ? in(kGh0) : y + r.step(k - 1) * r.state();
      gru_step_grad(r, in(kGgates) + at * 4, h_before, dy ? dy + at : dy, dh, d_from_x + gates_at,
                    d_from_h + gates_at);
      state_gradient(r, width, d_from_h + gates_at, in(kGwhh), true, dh);
    }
    sequence_gradients(r, SequenceGradients<C>{.width = width,
                                               .x = in(kGx),
                                               .h0 = in(kGh0),
                                               .y = y,
                                               .w_ih = in(kGwih),
                                               .dgates_input = d_from_x,
                                               .dgates_state = d_from_h,
                                               .dx = staging.output(args, kDx),
                                               .dw_ih = staging.output(args, kDwih),
                                               .dw_hh = staging.output(args, kDwhh),
                                               .db_ih = staging.output(args, kDbih),
                                               .db_hh = staging.output(args, kDbhh)});
    staging.store(args);
  };
}

}  // namespace

void register_gru(KernelRegistry& registry) {
  registry.add("ortrain::GRU", {{.name = "ref", .make = [](NodeSpec& spec) {
                                   return dispatch_float(
                                       spec.input(kX).dtype,
                                       [&]<typename T>(TypeTag<T>) { return make_gru<T>(spec); });
                                 }}});
  registry.add("ortrain::GRUGrad", {{.name = "ref", .make = [](NodeSpec& spec) {
                                       return dispatch_float(spec.input(kGx).dtype,
                                                             [&]<typename T>(TypeTag<T>) {
                                                               return make_gru_grad<T>(spec);
                                                             });
                                     }}});
}

}  // namespace ortrain::cpu
