// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "ortrain/cpu/simd/vector_math.h"
#include "ortrain/ops/rnn/recurrence_impl.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

enum Forward { kX, kH0, kWih, kWhh, kBih, kBhh };
enum Outputs { kY, kHn };

bool uses_relu(const NodeSpec& spec) { return spec.attrs().string_("activation") == "relu"; }

template <typename C>
void activate(const Recurrence& r, bool relu, C* h) {
  parallel_for(r.state(), 4096, [&](int64_t begin, int64_t end) {
    if (!relu) return vector_tanh(h + begin, h + begin, end - begin);
    for (int64_t i = begin; i < end; ++i) h[i] = h[i] < C(0) ? C(0) : h[i];  // NaN stays
  });
}

template <typename T>
KernelFn make_rnn(NodeSpec& spec) {
  using C = ComputeType<T>;
  const Recurrence r = recurrence_of(spec, kX, kH0);
  const bool relu = uses_relu(spec);
  Staging<T> staging(spec);
  staging.require_output(kY, r.steps * r.state());
  const size_t bias_slot = staging.add_scratch(r.hidden);
  staging.request(spec);

  return [=, staging = std::move(staging)](const KernelArgs& args) {
    staging.load(args);
    const auto in = [&](size_t i) { return staging.input(args, i); };
    C *y = staging.output(args, kY), *bias = staging.scratch(args, bias_slot);
    const C *b_ih = in(kBih), *b_hh = in(kBhh);
    for (int64_t j = 0; j < r.hidden; ++j) {
      bias[j] = (b_ih ? b_ih[j] : C(0)) + (b_hh ? b_hh[j] : C(0));
    }
    project_inputs(r, r.hidden, in(kX), in(kWih), bias, y);
    const C* h = in(kH0);
    for (int64_t k = 0; k < r.steps; ++k) {
      C* next = y + r.step(k) * r.state();
      project_state(r, r.hidden, h, in(kWhh), static_cast<const C*>(nullptr), true, next);
      activate(r, relu, next);
      h = next;
    }
    if (C* h_n = staging.output(args, kHn)) std::copy_n(h, r.state(), h_n);
    staging.store(args);
  };
}

enum GradInputs { kDy, kDhn, kGx, kGh0, kGwih, kGwhh, kGy };
enum GradOutputs { kDx, kDh0, kDwih, kDwhh, kDb };

template <typename T>
KernelFn make_rnn_grad(NodeSpec& spec) {
  using C = ComputeType<T>;
  const Recurrence r = recurrence_of(spec, kGx, kGh0);
  const bool relu = uses_relu(spec);
  Staging<T> staging(spec);
  staging.require_output(kDh0, r.state());
  const size_t dgates_slot = staging.add_scratch(r.steps * r.state());
  staging.request(spec);

  return [=, staging = std::move(staging)](const KernelArgs& args) {
    staging.load(args);
    const auto in = [&](size_t i) { return staging.input(args, i); };
    C *dh = staging.output(args, kDh0), *dgates = staging.scratch(args, dgates_slot);
    const C *y = in(kGy), *dy = in(kDy);
    if (const C* dh_n = in(kDhn)) {
      std::copy_n(dh_n, r.state(), dh);
    } else {
      std::fill_n(dh, r.state(), C(0));
    }
    for (int64_t k = r.steps_with_state(); k-- > 0;) {
      const int64_t at = r.step(k) * r.state();
      parallel_for(r.state(), 4096, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const C h = y[at + i], d = dh[i] + (dy ? dy[at + i] : C(0));
          dgates[at + i] = relu ? (h <= C(0) ? C(0) : d) : d * (C(1) - h * h);
        }
      });
      state_gradient(r, r.hidden, dgates + at, in(kGwhh), false, dh);
    }
    sequence_gradients(r, SequenceGradients<C>{.width = r.hidden,
                                               .x = in(kGx),
                                               .h0 = in(kGh0),
                                               .y = y,
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

void register_rnn(KernelRegistry& registry) {
  registry.add("ortrain::RNN", {{.name = "ref", .make = [](NodeSpec& spec) {
                                   return dispatch_float(
                                       spec.input(kX).dtype,
                                       [&]<typename T>(TypeTag<T>) { return make_rnn<T>(spec); });
                                 }}});
  registry.add("ortrain::RNNGrad", {{.name = "ref", .make = [](NodeSpec& spec) {
                                       return dispatch_float(spec.input(kGx).dtype,
                                                             [&]<typename T>(TypeTag<T>) {
                                                               return make_rnn_grad<T>(spec);
                                                             });
                                     }}});
}

}  // namespace ortrain::cpu
