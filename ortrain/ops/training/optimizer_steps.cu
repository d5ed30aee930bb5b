// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "ortrain/gpu/copy_parts.h"
#include "ortrain/gpu/fault_state.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/optimizer.h"
#include "ortrain/ops/training/optimizer_rule.h"
#include "ortrain/ops/training/optimizer_steps.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

using ops::StepLayout;

// --- the coefficients, from numbers that only the device knows

ORTRAIN_DEVICE void make_coefficients(const StepRule& rule, double step, AdamCoefficients& c) {
  c = adam_coefficients(rule, step);
}
ORTRAIN_DEVICE void make_coefficients(const StepRule& rule, double step, LambCoefficients& c) {
  c = lamb_coefficients(rule, step);
}
ORTRAIN_DEVICE void make_coefficients(const StepRule& rule, double step, AdagradCoefficients& c) {
  c = adagrad_coefficients(rule, step);
}
ORTRAIN_DEVICE void make_coefficients(const StepRule& rule, double step, SgdCoefficients& c) {
  c = sgd_coefficients(rule, step <= 1);
}

// Also whether to leave the step out: where the graph says so, or values before it were wrong.
template <class Coefficients>
__global__ void prepare_step(StepRule rule, const double* rate, const int64_t* step,
                             const double* factor, const uint8_t* skip, const Fault* fault,
                             Coefficients* coefficients, uint8_t* skips) {
  if (threadIdx.x != 0) return;
  *skips = has_fault(fault) || (skip != nullptr && *skip != 0) ? 1 : 0;
  rule.lr = *rate;
  Coefficients c;
  make_coefficients(rule, static_cast<double>(*step), c);
  if (factor != nullptr) c.gradient_factor = *factor;
  *coefficients = c;
}

// --- tensors of a node

constexpr size_t kNone = SIZE_MAX;

// Where an operand's address comes from: an input, or an output that takes an input over.
struct Source {
  size_t input = kNone;
  size_t output = kNone;
};
struct PlannedTensor {
  int64_t size = 0;
  Source operands[5];  // parameter, gradient, states
  DType dtypes[5] = {DType::f32, DType::f32, DType::f32, DType::f32, DType::f32};
};

struct StepPlan {
  std::vector<PlannedTensor> tensors;

  PlannedTensor& add(const NodeSpec& spec, size_t parameter) {
    tensors.push_back({.size = spec.input(parameter).numel()});
    return tensors.back();
  }
  static void set(const NodeSpec& spec, PlannedTensor& tensor, size_t operand, size_t input,
                  size_t output) {
    tensor.operands[operand] = {input, output};
    tensor.dtypes[operand] = spec.input(input).dtype;
  }

  // The addresses of this run; outputs that are not in place get their inputs first.
  std::vector<OptimizerTensor> now(const KernelArgs& args) const {
    std::vector<OptimizerTensor> list(tensors.size());
    std::vector<Move> moves;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const PlannedTensor& tensor = tensors[i];
      list[i].size = tensor.size;
      OptimizerOperand* operands[] = {&list[i].param, &list[i].grad, &list[i].states[0],
                                      &list[i].states[1], &list[i].states[2]};
      for (size_t k = 0; k < 5; ++k) {
        const Source& source = tensor.operands[k];
        if (source.input == kNone) continue;
        const void* const input = args.in[source.input];
        void* const data =
            source.output == kNone ? const_cast<void*>(input) : args.out[source.output];
        *operands[k] = {data, tensor.dtypes[k]};
        if (data != input) {
          moves.push_back(
              {input, data, tensor.size * static_cast<int64_t>(size_of(tensor.dtypes[k]))});
        }
      }
    }
    copy_all(moves, args.stream);
    return list;
  }
  // Sizes alone.
  std::vector<OptimizerTensor> sizes() const {
    std::vector<OptimizerTensor> list(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) list[i].size = tensors[i].size;
    return list;
  }
};

StepLayout layout_of(const NodeSpec& spec) {
  return StepLayout(spec.num_inputs(), ops::num_states(spec.node().op, spec.attrs()));
}

StepPlan step_plan(const NodeSpec& spec, const StepLayout& at) {
  StepPlan plan;
  for (size_t i = 0; i < at.count; ++i) {
    PlannedTensor& tensor = plan.add(spec, at.parameter(i));
    StepPlan::set(spec, tensor, 0, at.parameter(i), at.new_parameter(i));
    StepPlan::set(spec, tensor, 1, at.gradient(i), kNone);
    for (size_t kind = 0; kind < at.states; ++kind) {
      StepPlan::set(spec, tensor, 2 + kind, at.state(kind, i), at.new_state(kind, i));
    }
  }
  return plan;
}

// Workspace: coefficients in front, whether to skip, then norms, then pieces of norms.
constexpr size_t kCoefficientBytes = 128;
constexpr size_t kHeadBytes = kCoefficientBytes + 64;

struct LambArrays {
  LambNorms* norms;
  double* pieces;
  LambArrays(void* workspace, size_t count)
      : norms(reinterpret_cast<LambNorms*>(static_cast<char*>(workspace) + kHeadBytes)),
        pieces(reinterpret_cast<double*>(norms + count)) {}
  static ByteCount bytes(const StepPlan& plan) {
    return ByteCount::of(kHeadBytes) + bytes_of<LambNorms>(plan.tensors.size()) +
           bytes_of<double>(2, norm_pieces(plan.sizes()));
  }
};

uint8_t* skip_of(const KernelArgs& args) {
  return static_cast<uint8_t*>(args.workspace) + kCoefficientBytes;
}

template <class Coefficients>
CoefficientList<Coefficients> prepared(const StepRule& rule, bool has_factor,
                                       const KernelArgs& args) {
  static_assert(sizeof(Coefficients) <= kCoefficientBytes);
  auto* const coefficients = static_cast<Coefficients*>(args.workspace);
  launch(prepare_step<Coefficients>, {.threads = kWarpSize}, args.stream, rule,
         args.input<double>(0), args.input<int64_t>(1),
         has_factor ? args.input<double>(2) : nullptr, args.input<uint8_t>(3), args.fault,
         coefficients, skip_of(args));
  return {coefficients, true};
}

template <class Coefficients>
KernelFn make_step(NodeSpec& spec,
                   void (*step)(std::span<const OptimizerTensor>, CoefficientList<Coefficients>,
                                const uint8_t*, void*)) {
  const StepLayout at = layout_of(spec);
  spec.request_workspace(ByteCount::of(kHeadBytes));
  return
      [plan = step_plan(spec, at), rule = ops::optimizer_rule(spec), step](const KernelArgs& args) {
        const std::vector<OptimizerTensor> tensors = plan.now(args);
        step(tensors, prepared<Coefficients>(rule, args.in[2] != nullptr, args), skip_of(args),
             args.stream);
      };
}

KernelFn make_lamb_step(NodeSpec& spec) {
  StepPlan plan = step_plan(spec, layout_of(spec));
  spec.request_workspace(LambArrays::bytes(plan));
  return [plan = std::move(plan), rule = ops::optimizer_rule(spec)](const KernelArgs& args) {
    const std::vector<OptimizerTensor> tensors = plan.now(args);
    const auto c = prepared<LambCoefficients>(rule, args.in[2] != nullptr, args);
    const LambArrays arrays(args.workspace, tensors.size());
    lamb_moments(tensors, c, skip_of(args), arrays.pieces, arrays.norms, args.stream);
    lamb_update(tensors, c, skip_of(args), arrays.norms, args.stream);
  };
}

KernelFn make_lamb_moments(NodeSpec& spec) {
  const StepLayout at(spec.num_inputs(), 2);
  StepPlan plan;
  for (size_t i = 0; i < at.count; ++i) {
    PlannedTensor& tensor = plan.add(spec, at.parameter(i));
    StepPlan::set(spec, tensor, 0, at.parameter(i), kNone);
    StepPlan::set(spec, tensor, 1, at.gradient(i), kNone);
    for (size_t kind = 0; kind < 2; ++kind) {
      StepPlan::set(spec, tensor, 2 + kind, at.state(kind, i), 1 + kind * at.count + i);
    }
  }
  spec.request_workspace(LambArrays::bytes(plan));
  return [plan = std::move(plan), rule = ops::optimizer_rule(spec)](const KernelArgs& args) {
    const std::vector<OptimizerTensor> tensors = plan.now(args);
    const auto c = prepared<LambCoefficients>(rule, args.in[2] != nullptr, args);
    const LambArrays arrays(args.workspace, tensors.size());
    lamb_moments(tensors, c, skip_of(args), arrays.pieces, args.output<LambNorms>(0), args.stream);
  };
}

KernelFn make_lamb_update(NodeSpec& spec) {
  const StepLayout at(spec.num_inputs(), 1);
  StepPlan plan;
  for (size_t i = 0; i < at.count; ++i) {
    PlannedTensor& tensor = plan.add(spec, at.parameter(i));
    StepPlan::set(spec, tensor, 0, at.parameter(i), i);
    for (size_t kind = 0; kind < 2; ++kind) {
      StepPlan::set(spec, tensor, 2 + kind, at.gradient(i) + kind * at.count, kNone);
    }
  }
  spec.request_workspace(ByteCount::of(kHeadBytes));
  return [plan = std::move(plan), rule = ops::optimizer_rule(spec)](const KernelArgs& args) {
    const std::vector<OptimizerTensor> tensors = plan.now(args);
    // Input 2 are the norms: gradients are in the states already.
    const auto c = prepared<LambCoefficients>(rule, false, args);
    lamb_update(tensors, c, skip_of(args), args.input<LambNorms>(2), args.stream);
  };
}

KernelFn make_norm(NodeSpec& spec) {
  StepPlan plan;
  for (size_t i = 0; i < spec.num_inputs(); ++i) {
    StepPlan::set(spec, plan.add(spec, i), 1, i, kNone);
  }
  spec.request_workspace(bytes_of<double>(norm_pieces(plan.sizes())));
  return [plan = std::move(plan)](const KernelArgs& args) {
    gradient_norm(plan.now(args), static_cast<double*>(args.workspace), args.output<double>(0),
                  args.stream);
  };
}

__global__ void clip(double max_norm, const double* norm, const double* scale, double* factor,
                     double* unscaled, bool* finite) {
  if (threadIdx.x != 0) return;
  const double by = scale != nullptr ? *scale : 1.0;
  const double value = *norm / by;
  if (factor != nullptr) *factor = (max_norm > 0 ? clip_factor(value, max_norm) : 1.0) / by;
  if (unscaled != nullptr) *unscaled = value;
  if (finite != nullptr) *finite = value - value == 0;
}

KernelFn make_clip_factor(NodeSpec& spec) {
  return [max_norm = spec.attrs().float_("max_norm"), has_scale = spec.has_input(1),
          factor = spec.has_output(0), unscaled = spec.has_output(1),
          finite = spec.has_output(2)](const KernelArgs& args) {
    launch(clip, {.threads = kWarpSize}, args.stream, max_norm, args.input<double>(0),
           has_scale ? args.input<double>(1) : nullptr, factor ? args.output<double>(0) : nullptr,
           unscaled ? args.output<double>(1) : nullptr, finite ? args.output<bool>(2) : nullptr);
  };
}

using Pairs = std::vector<std::pair<int, int>>;

// Inputs from `input` on become outputs from `output` on.
void pair_up(Pairs& pairs, size_t input, size_t output, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    pairs.emplace_back(static_cast<int>(input + i), static_cast<int>(output + i));
  }
}

Pairs step_pairs(const NodeSpec& spec) {
  const StepLayout at = layout_of(spec);
  Pairs pairs;
  pair_up(pairs, at.parameter(0), at.new_parameter(0), at.count);
  pair_up(pairs, at.state(0, 0), at.new_state(0, 0), at.states * at.count);
  return pairs;
}
Pairs moments_pairs(const NodeSpec& spec) {
  const StepLayout at(spec.num_inputs(), 2);
  Pairs pairs;
  pair_up(pairs, at.state(0, 0), 1, 2 * at.count);
  return pairs;
}
Pairs update_pairs(const NodeSpec& spec) {
  const StepLayout at(spec.num_inputs(), 1);
  Pairs pairs;
  pair_up(pairs, at.parameter(0), 0, at.count);
  return pairs;
}

std::optional<std::string> refuse_absent_outputs(const NodeSpec& spec) {
  for (size_t i = 0; i < spec.num_outputs(); ++i) {
    if (!spec.has_output(i)) return "it makes all of its outputs";
  }
  return std::nullopt;
}

Kernel multi_tensor(std::function<KernelFn(NodeSpec&)> make, Pairs (*pairs)(const NodeSpec&)) {
  Kernel kernel{.name = "multi_tensor", .why_not = refuse_absent_outputs};
  kernel.make = std::move(make);
  kernel.inplace_of = pairs;
  return kernel;
}

}  // namespace

void register_optimizer_steps(KernelRegistry& registry) {
  registry.add(
      "ortrain::SgdStep",
      {multi_tensor([](NodeSpec& spec) { return make_step<SgdCoefficients>(spec, sgd_step); },
                    step_pairs)});
  registry.add(
      "ortrain::AdamStep",
      {multi_tensor([](NodeSpec& spec) { return make_step<AdamCoefficients>(spec, adam_step); },
                    step_pairs)});
  registry.add(
      "ortrain::AdagradStep",
      {multi_tensor(
          [](NodeSpec& spec) { return make_step<AdagradCoefficients>(spec, adagrad_step); },
          step_pairs)});
  registry.add("ortrain::LambStep", {multi_tensor(make_lamb_step, step_pairs)});
  registry.add("ortrain::LambMoments", {multi_tensor(make_lamb_moments, moments_pairs)});
  registry.add("ortrain::LambUpdate", {multi_tensor(make_lamb_update, update_pairs)});
  registry.add("ortrain::GradientNorm", {{.name = "multi_tensor", .make = make_norm}});
  registry.add("ortrain::ClipFactor", {{.name = "one_thread", .make = make_clip_factor}});
}

}  // namespace ortrain::gpu
