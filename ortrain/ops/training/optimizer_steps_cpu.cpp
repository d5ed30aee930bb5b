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
#include "ortrain/cpu/optimizer.h"
#include "ortrain/ops/training/optimizer_rule.h"
#include "ortrain/ops/training/optimizer_steps.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

using ops::StepLayout;

// The coefficients of a step: `rule` with the rate of now, for gradients times their factor.
template <class Rule>
typename Rule::Coefficients coefficients_now(StepRule rule, const KernelArgs& args) {
  rule.lr = *args.input<double>(0);
  auto coefficients = Rule::coefficients(rule, static_cast<double>(*args.input<int64_t>(1)));
  if (args.in[2] != nullptr) coefficients.gradient_factor = *args.input<double>(2);
  return coefficients;
}

// Of each operator the multi-tensor step, and one element in double: the truth in tests.
struct AdamRule {
  using Coefficients = AdamCoefficients;
  static constexpr auto kStep = adam_step;
  static constexpr auto coefficients = adam_coefficients;

  static double reference(const AdamCoefficients& c, double g, double p, double* state, double) {
    g = g * c.gradient_factor + c.l2 * p;
    state[0] = c.beta1 * state[0] + (1 - c.beta1) * g;
    state[1] = c.beta2 * state[1] + (1 - c.beta2) * g * g;
    const double divisor = std::sqrt(state[1]) * c.root_scale + c.epsilon;
    return c.keep_after * (c.keep_before * p - c.step_size * state[0] / divisor);
  }
};

struct SgdRule {
  using Coefficients = SgdCoefficients;
  static constexpr auto kStep = sgd_step;
  static SgdCoefficients coefficients(const StepRule& rule, double step) {
    return sgd_coefficients(rule, step <= 1);
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
  static constexpr auto coefficients = adagrad_coefficients;

  static double reference(const AdagradCoefficients& c, double g, double p, double* state, double) {
    g = g * c.gradient_factor + c.l2 * p;
    state[0] += g * g;
    return p - c.lr * g / (std::sqrt(state[0]) + c.epsilon);
  }
};

struct LambRule {
  using Coefficients = LambCoefficients;
  static constexpr auto kStep = lamb_step;
  static constexpr auto coefficients = lamb_coefficients;

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
    state[0] = c.beta1 * state[0] + (1 - c.beta1) * g;
    state[1] = c.beta2 * state[1] + (1 - c.beta2) * g * g;
  }
};

StepLayout layout_of(const NodeSpec& spec) {
  return StepLayout(spec.num_inputs(), ops::num_states(spec.node().op, spec.attrs()));
}

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

std::vector<std::pair<int, int>> step_pairs(const NodeSpec& spec) {
  const StepLayout at = layout_of(spec);
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
  const StepLayout at = layout_of(spec);
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
  spec.request_workspace(bytes_of<OptimizerTensor>(at.count) + bytes_of<Coefficients>(at.count));
  return [rule = ops::optimizer_rule(spec), at, plans = std::move(plans),
          tensors = std::move(tensors), blocks = std::move(blocks)](const KernelArgs& args) {
    if (!begin_step(at, plans, args) || at.count == 0) return;
    auto* const now = static_cast<OptimizerTensor*>(args.workspace);
    auto* const coefficients = reinterpret_cast<Coefficients*>(now + at.count);
    std::uninitialized_fill_n(coefficients, at.count, coefficients_now<Rule>(rule, args));
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

template <class Rule>
KernelFn make_reference(NodeSpec& spec) {
  const StepLayout at = layout_of(spec);
  return [rule = ops::optimizer_rule(spec), at,
          plans = tensor_plans(spec)](const KernelArgs& args) {
    if (!begin_step(at, plans, args)) return;
    const auto c = coefficients_now<Rule>(rule, args);
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
        ratio = lamb_ratio({norm, update_norm}, c);
      }
      for (int64_t k = 0; k < plans[at.parameter(i)].size; ++k) {
        load_state(k);
        store(type, param, k, Rule::reference(c, gradient(k), load(type, param, k), state, ratio));
        store_state(k);
      }
    }
  };
}

// --- LAMB in two parts

// What the attributes of one of the two say; LambMoments has no bounds.
LambCoefficients lamb_now(StepRule rule, const KernelArgs& args) {
  rule.lr = *args.input<double>(0);
  return lamb_coefficients(rule, static_cast<double>(*args.input<int64_t>(1)));
}

void copy_unless_in_place(const KernelArgs& args, size_t input, size_t output, size_t bytes) {
  if (args.out[output] != args.in[input] && bytes > 0) {
    std::memcpy(args.out[output], args.in[input], bytes);
  }
}

bool skips(const KernelArgs& args) { return args.in[3] != nullptr && *args.input<bool>(3); }

// The tensors of a node with the types of its inputs; `kinds` of them stand in a row.
std::vector<OptimizerTensor> tensors_of(const std::vector<TensorPlan>& plans, const StepLayout& at,
                                        bool has_gradient) {
  std::vector<OptimizerTensor> tensors(at.count);
  for (size_t i = 0; i < at.count; ++i) {
    tensors[i].size = plans[at.parameter(i)].size;
    tensors[i].param.storage = storage_of(plans[at.parameter(i)].dtype);
    if (has_gradient) tensors[i].grad.storage = storage_of(plans[at.gradient(i)].dtype);
    for (size_t kind = 0; kind < 2; ++kind) {
      const size_t input = has_gradient ? at.state(kind, i) : at.gradient(i) + kind * at.count;
      tensors[i].states[kind].storage = storage_of(plans[input].dtype);
    }
  }
  return tensors;
}

KernelFn make_lamb_moments(NodeSpec& spec) {
  const StepLayout at(spec.num_inputs(), 2);
  std::vector<TensorPlan> plans = tensor_plans(spec);
  std::vector<OptimizerTensor> tensors = tensors_of(plans, at, true);
  auto blocks = std::make_shared<TensorBlocks>();
  blocks->assign(tensors);
  return [rule = ops::optimizer_rule(spec), at, plans = std::move(plans),
          tensors = std::move(tensors), blocks = std::move(blocks)](const KernelArgs& args) {
    std::vector<OptimizerTensor> now = tensors;
    for (size_t i = 0; i < at.count; ++i) {
      now[i].param.data = const_cast<void*>(args.in[at.parameter(i)]);
      now[i].grad.data = const_cast<void*>(args.in[at.gradient(i)]);
      for (size_t kind = 0; kind < 2; ++kind) {
        const size_t output = 1 + kind * at.count + i;
        copy_unless_in_place(args, at.state(kind, i), output, plans[at.state(kind, i)].bytes);
        now[i].states[kind].data = args.out[output];
      }
    }
    std::vector<LambNorms> norms(at.count);
    if (!skips(args)) {
      LambCoefficients coefficients = lamb_now(rule, args);
      if (args.in[2] != nullptr) coefficients.gradient_factor = *args.input<double>(2);
      lamb_moments(now, *blocks, std::vector(at.count, coefficients), norms);
    }
    for (size_t i = 0; i < at.count; ++i) {
      args.output<double>(0)[2 * i] = norms[i].param;
      args.output<double>(0)[2 * i + 1] = norms[i].update;
    }
  };
}

KernelFn make_lamb_update(NodeSpec& spec) {
  const StepLayout at(spec.num_inputs(), 1);
  std::vector<TensorPlan> plans = tensor_plans(spec);
  std::vector<OptimizerTensor> tensors = tensors_of(plans, at, false);
  auto blocks = std::make_shared<TensorBlocks>();
  blocks->assign(tensors);
  return [rule = ops::optimizer_rule(spec), at, plans = std::move(plans),
          tensors = std::move(tensors), blocks = std::move(blocks)](const KernelArgs& args) {
    std::vector<OptimizerTensor> now = tensors;
    std::vector<LambNorms> norms(at.count);
    for (size_t i = 0; i < at.count; ++i) {
      copy_unless_in_place(args, at.parameter(i), i, plans[at.parameter(i)].bytes);
      now[i].param.data = args.out[i];
      for (size_t kind = 0; kind < 2; ++kind) {
        now[i].states[kind].data = const_cast<void*>(args.in[at.gradient(i) + kind * at.count]);
      }
      norms[i] = {args.input<double>(2)[2 * i], args.input<double>(2)[2 * i + 1]};
    }
    if (skips(args)) return;
    lamb_update(now, *blocks, std::vector(at.count, lamb_now(rule, args)), norms);
  };
}

KernelFn make_lamb_moments_reference(NodeSpec& spec) {
  const StepLayout at(spec.num_inputs(), 2);
  return [rule = ops::optimizer_rule(spec), at,
          plans = tensor_plans(spec)](const KernelArgs& args) {
    LambCoefficients c = lamb_now(rule, args);
    if (args.in[2] != nullptr) c.gradient_factor = *args.input<double>(2);
    for (size_t i = 0; i < at.count; ++i) {
      double norm = 0, update_norm = 0;
      for (int64_t k = 0; k < plans[at.parameter(i)].size; ++k) {
        double state[2];
        for (size_t kind = 0; kind < 2; ++kind) {
          const size_t input = at.state(kind, i);
          state[kind] = load(plans[input].dtype, args.in[input], k);
        }
        if (!skips(args)) {
          const size_t gradient = at.gradient(i), parameter = at.parameter(i);
          LambRule::moments(c, load(plans[gradient].dtype, args.in[gradient], k), state);
          const double p = load(plans[parameter].dtype, args.in[parameter], k);
          const double u = LambRule::update(c, p, state);
          norm += p * p;
          update_norm += u * u;
        }
        for (size_t kind = 0; kind < 2; ++kind) {
          store(plans[at.state(kind, i)].dtype, args.out[1 + kind * at.count + i], k, state[kind]);
        }
      }
      args.output<double>(0)[2 * i] = norm;
      args.output<double>(0)[2 * i + 1] = update_norm;
    }
  };
}

KernelFn make_lamb_update_reference(NodeSpec& spec) {
  const StepLayout at(spec.num_inputs(), 1);
  return
      [rule = ops::optimizer_rule(spec), at, plans = tensor_plans(spec)](const KernelArgs& args) {
        const LambCoefficients c = lamb_now(rule, args);
        for (size_t i = 0; i < at.count; ++i) {
          const double* const norms = args.input<double>(2) + 2 * i;
          const double ratio = lamb_ratio({norms[0], norms[1]}, c);
          const size_t parameter = at.parameter(i);
          for (int64_t k = 0; k < plans[parameter].size; ++k) {
            double state[2];
            for (size_t kind = 0; kind < 2; ++kind) {
              const size_t input = at.gradient(i) + kind * at.count;
              state[kind] = load(plans[input].dtype, args.in[input], k);
            }
            const double p = load(plans[parameter].dtype, args.in[parameter], k);
            store(plans[parameter].dtype, args.out[i], k,
                  skips(args) ? p : LambRule::reference(c, 0, p, state, ratio));
          }
        }
      };
}

std::vector<std::pair<int, int>> moments_pairs(const NodeSpec& spec) {
  const StepLayout at(spec.num_inputs(), 2);
  std::vector<std::pair<int, int>> pairs;
  for (size_t i = 0; i < 2 * at.count; ++i) pairs.emplace_back(at.state(0, 0) + i, 1 + i);
  return pairs;
}

std::vector<std::pair<int, int>> update_pairs(const NodeSpec& spec) {
  const StepLayout at(spec.num_inputs(), 1);
  std::vector<std::pair<int, int>> pairs;
  for (size_t i = 0; i < at.count; ++i) pairs.emplace_back(at.parameter(i), i);
  return pairs;
}

template <class Rule>
std::vector<Kernel> step_kernels() {
  return {{.name = "multi_tensor",
           .why_not = refuse_absent_outputs,
           .make = make_step<Rule>,
           .inplace_of = step_pairs},
          {.name = "ref",
           .why_not = refuse_absent_outputs,
           .make = make_reference<Rule>,
           .inplace_of = step_pairs}};
}

KernelFn make_norm(NodeSpec& spec) {
  std::vector<OptimizerTensor> tensors(spec.num_inputs());
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].size = spec.input(i).numel();
    tensors[i].grad.storage = storage_of(spec.input(i).dtype);
  }
  auto blocks = std::make_shared<TensorBlocks>();
  blocks->assign(tensors);
  spec.request_workspace(bytes_of<OptimizerTensor>(tensors.size()));
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
  registry.add("ortrain::LambMoments", {{.name = "multi_tensor",
                                         .why_not = refuse_absent_outputs,
                                         .make = make_lamb_moments,
                                         .inplace_of = moments_pairs},
                                        {.name = "ref",
                                         .why_not = refuse_absent_outputs,
                                         .make = make_lamb_moments_reference,
                                         .inplace_of = moments_pairs}});
  registry.add("ortrain::LambUpdate", {{.name = "multi_tensor",
                                        .why_not = refuse_absent_outputs,
                                        .make = make_lamb_update,
                                        .inplace_of = update_pairs},
                                       {.name = "ref",
                                        .why_not = refuse_absent_outputs,
                                        .make = make_lamb_update_reference,
                                        .inplace_of = update_pairs}});
  registry.add("ortrain::GradientNorm", {{.name = "multi_tensor", .make = make_norm},
                                         {.name = "ref", .make = make_norm_reference}});
  registry.add("ortrain::ClipFactor", {{.name = "ref", .make = make_clip_factor}});
}

}  // namespace ortrain::cpu
