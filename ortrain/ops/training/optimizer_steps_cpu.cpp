// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/gemm_any.h"
#include "ortrain/cpu/optimizer.h"
#include "ortrain/ops/training/optimizer_steps.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

using ops::StepLayout;

enum class DecayMode { decoupled, after, l2 };

DecayMode decay_mode(const std::string& name) {
  if (name == "decoupled") return DecayMode::decoupled;
  if (name == "after") return DecayMode::after;
  if (name == "l2") return DecayMode::l2;
  throw InvalidModelError(str("decay_mode '", name, "' is none of decoupled, after, l2"));
}

// What a step reads from its scalars.
struct StepScalars {
  double rate, step, factor;

  explicit StepScalars(const KernelArgs& args)
      : rate(*args.input<double>(0)),
        step(static_cast<double>(*args.input<int64_t>(1))),
        factor(args.in[2] == nullptr ? 1.0 : *args.input<double>(2)) {}
};

struct AdamRule {
  using Coefficients = AdamCoefficients;
  static constexpr auto kStep = adam_step;
  double beta1, beta2, epsilon, weight_decay;
  DecayMode mode;
  bool bias_correction;

  explicit AdamRule(const AttributeReader& attrs)
      : beta1(attrs.float_("beta1")),
        beta2(attrs.float_("beta2")),
        epsilon(attrs.float_("epsilon")),
        weight_decay(attrs.float_("weight_decay")),
        mode(decay_mode(attrs.string_("decay_mode"))),
        bias_correction(attrs.int_("bias_correction") != 0) {}
  static size_t num_states(const AttributeReader&) { return 2; }

  AdamCoefficients operator()(const StepScalars& now) const {
    AdamCoefficients c{.beta1 = beta1,
                       .beta2 = beta2,
                       .epsilon = epsilon,
                       .step_size = now.rate,
                       .gradient_factor = now.factor};
    const double root2 = bias_correction ? std::sqrt(1 - std::pow(beta2, now.step)) : 1.0;
    if (bias_correction) c.step_size /= 1 - std::pow(beta1, now.step);
    if (mode == DecayMode::after) {
      c.step_size *= root2;
      c.keep_after = 1 - now.rate * weight_decay;
    } else {
      c.root_scale = 1 / root2;
      if (mode == DecayMode::decoupled) c.keep_before = 1 - now.rate * weight_decay;
      if (mode == DecayMode::l2) c.l2 = weight_decay;
    }
    return c;
  }

  // One element in double: the truth in tests.
  static double reference(const AdamCoefficients& c, double g, double p, double* state, double) {
    g = g * c.gradient_factor + c.l2 * p;
    state[0] += (1 - c.beta1) * (g - state[0]);
    state[1] = c.beta2 * state[1] + (1 - c.beta2) * g * g;
    return c.keep_after *
           (c.keep_before * p -
            c.step_size * state[0] / (std::sqrt(state[1]) * c.root_scale + c.epsilon));
  }
};

struct SgdRule {
  using Coefficients = SgdCoefficients;
  static constexpr auto kStep = sgd_step;
  double momentum, dampening, weight_decay;
  bool nesterov;

  explicit SgdRule(const AttributeReader& attrs)
      : momentum(attrs.float_("momentum")),
        dampening(attrs.float_("dampening")),
        weight_decay(attrs.float_("weight_decay")),
        nesterov(attrs.int_("nesterov") != 0) {}
  static size_t num_states(const AttributeReader& attrs) {
    return attrs.float_("momentum") != 0.0 ? 1 : 0;
  }

  SgdCoefficients operator()(const StepScalars& now) const {
    const bool first = now.step <= 1;
    return {.lr = now.rate,
            .momentum = momentum,
            .buffer_keep = first ? 0.0 : momentum,
            .buffer_gain = first ? 1.0 : 1 - dampening,
            .l2 = weight_decay,
            .gradient_factor = now.factor,
            .nesterov = nesterov};
  }

  static double reference(const SgdCoefficients& c, double g, double p, double* state, double) {
    g = g * c.gradient_factor + c.l2 * p;
    if (c.momentum != 0) {
      state[0] = c.buffer_keep * state[0] + c.buffer_gain * g;
      g = c.nesterov ? g + c.momentum * state[0] : state[0];
    }
    return p - c.lr * g;
  }
};

struct AdagradRule {
  using Coefficients = AdagradCoefficients;
  static constexpr auto kStep = adagrad_step;
  double epsilon, weight_decay, rate_decay;

  explicit AdagradRule(const AttributeReader& attrs)
      : epsilon(attrs.float_("epsilon")),
        weight_decay(attrs.float_("weight_decay")),
        rate_decay(attrs.float_("rate_decay")) {}
  static size_t num_states(const AttributeReader&) { return 1; }

  AdagradCoefficients operator()(const StepScalars& now) const {
    return {.lr = now.rate / (1 + (now.step - 1) * rate_decay),
            .epsilon = epsilon,
            .l2 = weight_decay,
            .gradient_factor = now.factor};
  }

  static double reference(const AdagradCoefficients& c, double g, double p, double* state, double) {
    g = g * c.gradient_factor + c.l2 * p;
    state[0] += g * g;
    return p - c.lr * g / (std::sqrt(state[0]) + c.epsilon);
  }
};

struct LambRule {
  using Coefficients = LambCoefficients;
  static constexpr auto kStep = lamb_step;
  double beta1, beta2, epsilon, weight_decay, ratio_min, ratio_max;
  bool bias_correction;

  explicit LambRule(const AttributeReader& attrs)
      : beta1(attrs.float_("beta1")),
        beta2(attrs.float_("beta2")),
        epsilon(attrs.float_("epsilon")),
        weight_decay(attrs.float_("weight_decay")),
        ratio_min(attrs.float_("ratio_min")),
        ratio_max(attrs.float_("ratio_max")),
        bias_correction(attrs.int_("bias_correction") != 0) {}
  static size_t num_states(const AttributeReader&) { return 2; }

  LambCoefficients operator()(const StepScalars& now) const {
    const auto correction = [&](double beta) {
      return bias_correction ? 1 / (1 - std::pow(beta, now.step)) : 1.0;
    };
    return {.beta1 = beta1,
            .beta2 = beta2,
            .epsilon = epsilon,
            .lr = now.rate,
            .mean_scale = correction(beta1),
            .root_scale = std::sqrt(correction(beta2)),
            .weight_decay = weight_decay,
            .ratio_min = ratio_min,
            .ratio_max = ratio_max,
            .gradient_factor = now.factor};
  }

  static double update(const LambCoefficients& c, double p, const double* state) {
    return c.mean_scale * state[0] / (std::sqrt(state[1]) * c.root_scale + c.epsilon) +
           c.weight_decay * p;
  }
  // `ratio`: what the norms give, once all elements have their moments.
  static double reference(const LambCoefficients& c, double, double p, double* state,
                          double ratio) {
    return p - c.lr * ratio * update(c, p, state);
  }
  static void moments(const LambCoefficients& c, double g, double* state) {
    g *= c.gradient_factor;
    state[0] += (1 - c.beta1) * (g - state[0]);
    state[1] = c.beta2 * state[1] + (1 - c.beta2) * g * g;
  }
};

struct TensorPlan {
  int64_t size = 0;
  size_t bytes = 0;
  DType dtype = DType::undefined;
};

// Types and sizes of the tensors of a step, by their input.
std::vector<TensorPlan> tensor_plans(const NodeSpec& spec) {
  std::vector<TensorPlan> plans(spec.num_inputs());
  for (size_t i = ops::kStepScalars; i < spec.num_inputs(); ++i) {
    plans[i] = {spec.input(i).numel(), spec.input(i).bytes(), spec.input(i).dtype};
  }
  return plans;
}

// Copies into the outputs what is not there in place already. Whether the step is to be made.
bool begin_step(const StepLayout& at, const std::vector<TensorPlan>& plans,
                const KernelArgs& args) {
  const auto keep = [&](size_t input, size_t output) {
    if (args.out[output] != nullptr && args.out[output] != args.in[input] &&
        plans[input].bytes > 0) {
      std::memcpy(args.out[output], args.in[input], plans[input].bytes);
    }
  };
  for (size_t i = 0; i < at.count; ++i) {
    keep(at.parameter(i), at.new_parameter(i));
    for (size_t kind = 0; kind < at.states; ++kind) keep(at.state(kind, i), at.new_state(kind, i));
  }
  return args.in[3] == nullptr || !*args.input<bool>(3);
}

std::vector<std::pair<int, int>> step_pairs(const NodeSpec& spec, size_t states) {
  const StepLayout at(spec.num_inputs(), states);
  std::vector<std::pair<int, int>> pairs;
  for (size_t i = 0; i < at.count; ++i) {
    pairs.emplace_back(at.parameter(i), at.new_parameter(i));
    for (size_t kind = 0; kind < at.states; ++kind) {
      pairs.emplace_back(at.state(kind, i), at.new_state(kind, i));
    }
  }
  return pairs;
}

std::optional<std::string> refuse_absent_outputs(const NodeSpec& spec) {
  for (size_t i = 0; i < spec.num_outputs(); ++i) {
    if (!spec.has_output(i)) return "it makes all of its outputs";
  }
  return std::nullopt;
}

template <class Rule>
KernelFn make_step(NodeSpec& spec) {
  using Coefficients = typename Rule::Coefficients;
  const StepLayout at(spec.num_inputs(), Rule::num_states(spec.attrs()));
  std::vector<TensorPlan> plans = tensor_plans(spec);
  std::vector<OptimizerTensor> tensors(at.count);
  for (size_t i = 0; i < at.count; ++i) {
    tensors[i].size = plans[at.parameter(i)].size;
    tensors[i].param.storage = storage_of(plans[at.parameter(i)].dtype);
    tensors[i].grad.storage = storage_of(plans[at.gradient(i)].dtype);
    for (size_t kind = 0; kind < at.states; ++kind) {
      tensors[i].states[kind].storage = storage_of(plans[at.state(kind, i)].dtype);
    }
  }
  auto blocks = std::make_shared<TensorBlocks>();
  blocks->assign(tensors);
  static_assert(std::is_trivially_copyable_v<OptimizerTensor> &&
                std::is_trivially_copyable_v<Coefficients>);
  spec.request_workspace(at.count * (sizeof(OptimizerTensor) + sizeof(Coefficients)));
  return [rule = Rule(spec.attrs()), at, plans = std::move(plans), tensors = std::move(tensors),
          blocks = std::move(blocks)](const KernelArgs& args) {
    if (!begin_step(at, plans, args) || at.count == 0) return;
    auto* const now = static_cast<OptimizerTensor*>(args.workspace);
    auto* const coefficients = reinterpret_cast<Coefficients*>(now + at.count);
    std::uninitialized_fill_n(coefficients, at.count, rule(StepScalars(args)));
    std::uninitialized_copy(tensors.begin(), tensors.end(), now);
    for (size_t i = 0; i < at.count; ++i) {
      now[i].param.data = args.out[at.new_parameter(i)];
      now[i].grad.data = const_cast<void*>(args.in[at.gradient(i)]);
      for (size_t kind = 0; kind < at.states; ++kind) {
        now[i].states[kind].data = args.out[at.new_state(kind, i)];
      }
    }
    Rule::kStep({now, at.count}, *blocks, {coefficients, at.count});
  };
}

double load(DType dtype, const void* data, int64_t i) {
  return dispatch_float(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return static_cast<double>(static_cast<ComputeType<T>>(static_cast<const T*>(data)[i]));
  });
}

void store(DType dtype, void* data, int64_t i, double value) {
  dispatch_float(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    static_cast<T*>(data)[i] = static_cast<T>(static_cast<ComputeType<T>>(value));
  });
}

double lamb_ratio(const LambCoefficients& c, double param, double update) {
  if (param == 0 || update == 0) return 1;
  return std::max(std::min(std::sqrt(param) / std::sqrt(update), c.ratio_max), c.ratio_min);
}

template <class Rule>
KernelFn make_reference(NodeSpec& spec) {
  const StepLayout at(spec.num_inputs(), Rule::num_states(spec.attrs()));
  return [rule = Rule(spec.attrs()), at, plans = tensor_plans(spec)](const KernelArgs& args) {
    if (!begin_step(at, plans, args)) return;
    const auto c = rule(StepScalars(args));
    for (size_t i = 0; i < at.count; ++i) {
      const DType type = plans[at.parameter(i)].dtype;
      void* const param = args.out[at.new_parameter(i)];
      double state[2] = {};
      const auto load_state = [&](int64_t k) {
        for (size_t kind = 0; kind < at.states; ++kind) {
          state[kind] = load(plans[at.state(kind, i)].dtype, args.out[at.new_state(kind, i)], k);
        }
      };
      const auto store_state = [&](int64_t k) {
        for (size_t kind = 0; kind < at.states; ++kind) {
          store(plans[at.state(kind, i)].dtype, args.out[at.new_state(kind, i)], k, state[kind]);
        }
      };
      const auto gradient = [&](int64_t k) {
        return load(plans[at.gradient(i)].dtype, args.in[at.gradient(i)], k);
      };
      double ratio = 1;
      if constexpr (std::is_same_v<Rule, LambRule>) {
        double norm = 0, update_norm = 0;
        for (int64_t k = 0; k < plans[at.parameter(i)].size; ++k) {
          load_state(k);
          LambRule::moments(c, gradient(k), state);
          const double p = load(type, param, k), u = LambRule::update(c, p, state);
          norm += p * p;
          update_norm += u * u;
          store_state(k);
        }
        ratio = lamb_ratio(c, norm, update_norm);
      }
      for (int64_t k = 0; k < plans[at.parameter(i)].size; ++k) {
        load_state(k);
        store(type, param, k, Rule::reference(c, gradient(k), load(type, param, k), state, ratio));
        store_state(k);
      }
    }
  };
}

template <class Rule>
std::vector<Kernel> step_kernels() {
  const auto pairs = [](const NodeSpec& spec) {
    return step_pairs(spec, Rule::num_states(spec.attrs()));
  };
  return {{.name = "multi_tensor",
           .why_not = refuse_absent_outputs,
           .make = make_step<Rule>,
           .inplace_of = pairs},
          {.name = "ref",
           .why_not = refuse_absent_outputs,
           .make = make_reference<Rule>,
           .inplace_of = pairs}};
}

KernelFn make_norm(NodeSpec& spec) {
  std::vector<OptimizerTensor> tensors(spec.num_inputs());
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].size = spec.input(i).numel();
    tensors[i].grad.storage = storage_of(spec.input(i).dtype);
  }
  auto blocks = std::make_shared<TensorBlocks>();
  blocks->assign(tensors);
  spec.request_workspace(tensors.size() * sizeof(OptimizerTensor));
  return [tensors = std::move(tensors), blocks = std::move(blocks)](const KernelArgs& args) {
    auto* const now = static_cast<OptimizerTensor*>(args.workspace);
    std::uninitialized_copy(tensors.begin(), tensors.end(), now);
    for (size_t i = 0; i < tensors.size(); ++i) now[i].grad.data = const_cast<void*>(args.in[i]);
    *args.output<double>(0) = gradient_norm({now, tensors.size()}, *blocks);
  };
}

KernelFn make_norm_reference(NodeSpec& spec) {
  std::vector<TensorPlan> plans;
  for (size_t i = 0; i < spec.num_inputs(); ++i) {
    plans.push_back({spec.input(i).numel(), spec.input(i).bytes(), spec.input(i).dtype});
  }
  return [plans = std::move(plans)](const KernelArgs& args) {
    double total = 0;
    for (size_t i = 0; i < plans.size(); ++i) {
      for (int64_t k = 0; k < plans[i].size; ++k) {
        const double g = load(plans[i].dtype, args.in[i], k);
        total += g * g;
      }
    }
    *args.output<double>(0) = std::sqrt(total);
  };
}

KernelFn make_clip_factor(NodeSpec& spec) {
  return [max_norm = spec.attrs().float_("max_norm"), has_scale = spec.has_input(1),
          wants_factor = spec.has_output(0), wants_norm = spec.has_output(1),
          wants_finite = spec.has_output(2)](const KernelArgs& args) {
    const double scale = has_scale ? *args.input<double>(1) : 1.0;
    const double norm = *args.input<double>(0) / scale;
    if (wants_factor) {
      *args.output<double>(0) = (max_norm > 0 ? clip_factor(norm, max_norm) : 1.0) / scale;
    }
    if (wants_norm) *args.output<double>(1) = norm;
    if (wants_finite) *args.output<bool>(2) = std::isfinite(norm);
  };
}

}  // namespace

void register_optimizer_steps(KernelRegistry& registry);
void register_optimizer_steps(KernelRegistry& registry) {
  registry.add("ortrain::SgdStep", step_kernels<SgdRule>());
  registry.add("ortrain::AdamStep", step_kernels<AdamRule>());
  registry.add("ortrain::LambStep", step_kernels<LambRule>());
  registry.add("ortrain::AdagradStep", step_kernels<AdagradRule>());
  registry.add("ortrain::GradientNorm", {{.name = "multi_tensor", .make = make_norm},
                                         {.name = "ref", .make = make_norm_reference}});
  registry.add("ortrain::ClipFactor", {{.name = "ref", .make = make_clip_factor}});
}

}  // namespace ortrain::cpu
