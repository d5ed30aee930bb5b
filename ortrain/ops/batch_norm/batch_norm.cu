// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "ortrain/ops/batch_norm/unit_sums.cuh"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

// Values per channel of any float type, or none.
struct ChannelValues {
  const void* at = nullptr;
  DType type = DType::undefined;

  template <class C>
  ORTRAIN_DEVICE C get(int64_t c, C absent) const {
    switch (type) {
      case DType::f32:
        return static_cast<C>(static_cast<const float*>(at)[c]);
      case DType::f64:
        return static_cast<C>(static_cast<const double*>(at)[c]);
      case DType::f16:
        return static_cast<C>(float(static_cast<const Float16*>(at)[c]));
      case DType::bf16:
        return static_cast<C>(float(static_cast<const BFloat16*>(at)[c]));
      default:
        return absent;
    }
  }
};

struct ChannelResult {
  void* at = nullptr;
  DType type = DType::undefined;

  template <class C>
  ORTRAIN_DEVICE void set(int64_t c, C value) const {
    switch (type) {
      case DType::f32:
        static_cast<float*>(at)[c] = static_cast<float>(value);
        break;
      case DType::f64:
        static_cast<double*>(at)[c] = static_cast<double>(value);
        break;
      case DType::f16:
        static_cast<Float16*>(at)[c] = Float16(static_cast<float>(value));
        break;
      case DType::bf16:
        static_cast<BFloat16*>(at)[c] = BFloat16(static_cast<float>(value));
        break;
      default:
        break;
    }
  }
};

// The types of a node's inputs and outputs, to be joined with their addresses.
struct ChannelTypes {
  static constexpr size_t kMost = 9;
  DType in[kMost] = {}, out[kMost] = {};

  explicit ChannelTypes(const NodeSpec& spec) {
    for (size_t i = 0; i < kMost; ++i) {
      in[i] = spec.has_input(i) ? spec.input(i).dtype : DType::undefined;
      out[i] = spec.has_output(i) ? spec.output(i).dtype : DType::undefined;
    }
  }
  ChannelValues input(const KernelArgs& args, size_t i) const {
    return in[i] == DType::undefined ? ChannelValues{} : ChannelValues{args.in[i], in[i]};
  }
  ChannelResult output(const KernelArgs& args, size_t i) const {
    return out[i] == DType::undefined ? ChannelResult{} : ChannelResult{args.out[i], out[i]};
  }
};

Units units_of(const Dims& x) { return {x[0], x[1], num_elements(Dims(x.begin() + 2, x.end()))}; }

// Workspace: what becomes of each channel, its mean, and the states of the parts.
template <class T, class State>
struct Workspace {
  using C = ComputeType<T>;
  Affine<C>* affine;
  C* means;
  State* partial;

  Workspace(const KernelArgs& args, const Units& u)
      : affine(static_cast<Affine<C>*>(args.workspace)),
        means(reinterpret_cast<C*>(affine + u.units)),
        partial(reinterpret_cast<State*>(means + (u.units + 15) / 16 * 16)) {}
  static ByteCount bytes(const Units& u, const UnitPlan& p) {
    return bytes_of<Affine<C>>(u.units) + bytes_of<C>((u.units + 15) / 16, 16) +
           bytes_of<State>(p.states(u));
  }
};

// --- forward

struct ForwardChannels {
  ChannelValues scale, bias, running_mean, running_var;
  ChannelResult next_mean, next_var, save_mean, save_invstd;
};

// `standard`: BatchNormalization, whose momentum is the share of what was there, and whose update
// takes the population's variance.
template <class C>
__global__ void __launch_bounds__(128)
    finish_forward(Units u, UnitPlan p, const Moments<C>* partial, C epsilon, double momentum,
                   bool standard, ForwardChannels ch, Affine<C>* affine) {
  const int64_t c = unit_of_warp();
  if (c >= u.units) return;
  const Moments<C> m = join_parts(partial, u, p, c, Moments<C>::none(), JoinMoments());
  if (lane() != 0) return;
  const auto count = static_cast<C>(u.count());
  const bool empty = u.count() == 0;
  C mean = m.mean, variance = m.variance();
  const C old_mean = ch.running_mean.get(c, C{0}), old_var = ch.running_var.get(c, C{1});
  if (standard && empty) {
    mean = old_mean;
    variance = old_var;
  }
  // Without any element the statistics stay as they are.
  const C rate = empty ? C{0} : static_cast<C>(standard ? 1 - momentum : momentum);
  const C keep = empty ? C{1} : static_cast<C>(standard ? momentum : 1 - momentum);
  const bool corrects = !standard && u.count() > 1;
  const C newer = corrects ? variance * (count / (count - C{1})) : variance;
  ch.next_mean.set(c, keep * old_mean + rate * mean);
  ch.next_var.set(c, keep * old_var + rate * newer);
  const C invstd = empty && !standard ? C{0} : C{1} / static_cast<C>(sqrt(variance + epsilon));
  ch.save_mean.set(c, mean);
  ch.save_invstd.set(c, invstd);
  affine[c] = {mean, C{0}, invstd * ch.scale.get(c, C{1}), ch.bias.get(c, C{0})};
}

// With given statistics.
template <class C>
__global__ void __launch_bounds__(kItemThreads)
    inference_affine(int64_t channels, C epsilon, ForwardChannels ch, Affine<C>* affine) {
  for_each_item(channels, [&](int64_t c) {
    const C invstd = C{1} / static_cast<C>(sqrt(ch.running_var.get(c, C{1}) + epsilon));
    affine[c] = {ch.running_mean.get(c, C{0}), C{0}, invstd * ch.scale.get(c, C{1}),
                 ch.bias.get(c, C{0})};
  });
}

template <bool kStandard>
KernelFn make_forward(NodeSpec& spec) {
  const Units u = units_of(spec.input(0).dims);
  const UnitPlan plan(u);
  const ChannelTypes types(spec);
  const double epsilon = spec.attrs().float_("epsilon"), momentum = spec.attrs().float_("momentum");
  const bool wants_y = spec.has_output(0);
  const bool by_batch = !kStandard || spec.attrs().int_("training_mode") != 0;
  return dispatch_float(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    using Work = Workspace<T, Moments<C>>;
    spec.request_workspace(Work::bytes(u, plan));
    return [=](const KernelArgs& args) {
      const Work work(args, u);
      const T* x = args.input<T>(0);
      ForwardChannels ch{types.input(args, 1), types.input(args, 2),  types.input(args, 3),
                         types.input(args, 4), types.output(args, 1), types.output(args, 2)};
      if (!kStandard) {
        ch.save_mean = types.output(args, 3);
        ch.save_invstd = types.output(args, 4);
      }
      if (by_batch) {
        launch_unit_sums<MomentSums<T>, T>(args.stream, {x}, u, plan, work.partial);
        launch(finish_forward<C>, warp_per_unit(u.units), args.stream, u, plan, work.partial,
               static_cast<C>(epsilon), momentum, kStandard, ch, work.affine);
      } else {
        launch(inference_affine<C>, items(u.units), args.stream, u.units, static_cast<C>(epsilon),
               ch, work.affine);
      }
      if (!wants_y) return;
      launch_affine<T>(args.stream, u, work.affine, static_cast<const T*>(nullptr), x,
                       args.output<T>(0));
    };
  });
}

// --- gradients

// Means as the sums need them.
template <class C>
__global__ void __launch_bounds__(kItemThreads)
    copy_means(int64_t channels, ChannelValues from, C* means) {
  for_each_item(channels, [&](int64_t c) { means[c] = from.get(c, C{0}); });
}

struct BackwardChannels {
  ChannelValues scale, mean, spread;  // spread: 1 / standard deviation, or the variance
  ChannelValues d_next_mean, d_next_var, d_mean, d_invstd;
  ChannelResult dscale, dbias, dmean, dvar;
};

// With xhat = (x - mean) invstd and n values per channel:
//   dx = scale invstd (dy - sum(dy) / n - xhat sum(dy xhat) / n) + (dmean + 2 dvar (x - mean)) / n
// where dmean and dvar gather what comes in through the statistics.
template <class C>
__global__ void __launch_bounds__(128)
    finish_backward(Units u, UnitPlan p, const TwoSums<C>* partial, double momentum,
                    BackwardChannels ch, Affine<C>* affine) {
  const int64_t c = unit_of_warp();
  if (c >= u.units) return;
  const TwoSums<C> sums = join_parts(partial, u, p, c, TwoSums<C>{0, 0}, AddBoth());
  if (lane() != 0) return;
  const C r = ch.spread.get(c, C{0}), count = static_cast<C>(u.count());
  ch.dscale.set(c, sums.second * r);
  ch.dbias.set(c, sums.first);
  if (u.count() == 0) return;
  const C rate = static_cast<C>(momentum);
  const C from_mean = rate * ch.d_next_mean.get(c, C{0}) + ch.d_mean.get(c, C{0});
  const C unbiased = u.count() > 1 ? count / (count - C{1}) : C{1};
  const C from_var =
      rate * unbiased * ch.d_next_var.get(c, C{0}) - C{0.5} * r * r * r * ch.d_invstd.get(c, C{0});
  const C factor = ch.scale.get(c, C{1}) * r;
  affine[c] = {ch.mean.get(c, C{0}), factor,
               (C{2} * from_var - factor * r * r * sums.second) / count,
               (from_mean - factor * sums.first) / count};
}

template <class C>
__global__ void __launch_bounds__(128)
    finish_inference_backward(Units u, UnitPlan p, const TwoSums<C>* partial, bool wants_sums,
                              C epsilon, BackwardChannels ch, Affine<C>* affine) {
  const int64_t c = unit_of_warp();
  if (c >= u.units) return;
  TwoSums<C> sums{0, 0};
  if (wants_sums) sums = join_parts(partial, u, p, c, sums, AddBoth());
  if (lane() != 0) return;
  const C invstd = C{1} / static_cast<C>(sqrt(ch.spread.get(c, C{1}) + epsilon));
  const C factor = ch.scale.get(c, C{1}) * invstd;
  ch.dscale.set(c, sums.second * invstd);
  ch.dbias.set(c, sums.first);
  ch.dmean.set(c, -factor * sums.first);
  ch.dvar.set(c, C{-0.5} * factor * invstd * invstd * sums.second);
  affine[c] = {C{0}, factor, C{0}, C{0}};
}

// Inputs dy, x, scale, mean, 1 / standard deviation (or the variance).
template <bool kInference>
KernelFn make_backward(NodeSpec& spec) {
  const Units u = units_of(spec.input(1).dims);
  const UnitPlan plan(u);
  const ChannelTypes types(spec);
  const double epsilon = kInference ? spec.attrs().float_("epsilon") : 0.0;
  const double momentum = kInference ? 0.0 : spec.attrs().float_("momentum");
  const bool has_dy = spec.has_input(0), wants_dx = spec.has_output(0);
  bool wants_sums = !kInference;
  for (size_t i = 1; i < 5; ++i) wants_sums |= spec.has_output(i);
  return dispatch_float(spec.input(1).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    using Work = Workspace<T, TwoSums<C>>;
    spec.request_workspace(Work::bytes(u, plan));
    return [=](const KernelArgs& args) {
      const Work work(args, u);
      const T *dy = has_dy ? args.input<T>(0) : nullptr, *x = args.input<T>(1);
      BackwardChannels ch{types.input(args, 2), types.input(args, 3), types.input(args, 4)};
      ch.dscale = types.output(args, 1);
      ch.dbias = types.output(args, 2);
      if (wants_sums) {
        launch(copy_means<C>, items(u.units), args.stream, u.units, ch.mean, work.means);
        launch_unit_sums<GradientSums<T>, T>(args.stream, {dy, x, work.means, 1}, u, plan,
                                             work.partial);
      }
      if constexpr (kInference) {
        ch.dmean = types.output(args, 3);
        ch.dvar = types.output(args, 4);
        launch(finish_inference_backward<C>, warp_per_unit(u.units), args.stream, u, plan,
               work.partial, wants_sums, static_cast<C>(epsilon), ch, work.affine);
      } else {
        ch.d_next_mean = types.input(args, 5);
        ch.d_next_var = types.input(args, 6);
        ch.d_mean = types.input(args, 7);
        ch.d_invstd = types.input(args, 8);
        launch(finish_backward<C>, warp_per_unit(u.units), args.stream, u, plan, work.partial,
               momentum, ch, work.affine);
      }
      if (!wants_dx) return;
      launch_affine<T>(args.stream, u, work.affine, dy, kInference ? nullptr : x,
                       args.output<T>(0));
    };
  });
}

template <size_t kInput>
std::optional<std::string> why_not(const NodeSpec& spec) {
  return too_many_units(units_of(spec.input(kInput).dims));
}

}  // namespace

void register_batch_norm(KernelRegistry& registry) {
  registry.add("ortrain::BatchNormTraining",
               {{.name = "units", .why_not = why_not<0>, .make = make_forward<false>}});
  registry.add("BatchNormalization",
               {{.name = "units", .why_not = why_not<0>, .make = make_forward<true>}});
  // All of dy is summed before dx, which may lie where dy is, is written.
  registry.add("ortrain::BatchNormGrad", {{.name = "units",
                                           .why_not = why_not<1>,
                                           .make = make_backward<false>,
                                           .inplace = {{0, 0}}}});
  registry.add(
      "ortrain::BatchNormInferenceGrad",
      {{.name = "units", .why_not = why_not<1>, .make = make_backward<true>, .inplace = {{0, 0}}}});
}

}  // namespace ortrain::gpu
