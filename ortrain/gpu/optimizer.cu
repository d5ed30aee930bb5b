// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "ortrain/gpu/fault_state.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/optimizer.h"

namespace ortrain::gpu {
namespace {

constexpr int kThreads = 128;
constexpr int kParameters = 128;
constexpr int kGroups = 8;

struct StepNumber {
  void* address = nullptr;
  uint8_t group = 0;  // of those that go along
  bool wide = false, first = false;
};
struct Schedule {
  DeviceArray<StepNumber, kParameters> parameters;
  DeviceArray<OptimizerGroup, kGroups> groups;
  int count = 0;
  int first_parameter = 0;
};
struct Scaling {
  double gradient_factor = 1;
  const float* grad_scale = nullptr;
  const float* found_inf = nullptr;
  const Fault* fault = nullptr;
  const double* raw_norm = nullptr;  // of the gradients as they are; null without a maximum
  double max_norm = 0;
  double* norm = nullptr;
};

// Coefficients of the step with number `step`.
template <class Coefficients>
struct Rule;
template <>
struct Rule<AdamCoefficients> {
  ORTRAIN_DEVICE static AdamCoefficients make(const StepRule& rule, double step, bool) {
    return adam_coefficients(rule, step);
  }
};
template <>
struct Rule<LambCoefficients> {
  ORTRAIN_DEVICE static LambCoefficients make(const StepRule& rule, double step, bool) {
    return lamb_coefficients(rule, step);
  }
};
template <>
struct Rule<AdagradCoefficients> {
  ORTRAIN_DEVICE static AdagradCoefficients make(const StepRule& rule, double step, bool) {
    return adagrad_coefficients(rule, step);
  }
};
template <>
struct Rule<SgdCoefficients> {
  ORTRAIN_DEVICE static SgdCoefficients make(const StepRule& rule, double, bool first) {
    return sgd_coefficients(rule, first);
  }
};

// A thread per parameter counts its step on and makes its coefficients.
template <class Coefficients>
__global__ void prepare(Schedule schedule, Scaling scaling, Coefficients* coefficients,
                        uint8_t* skip) {
  __shared__ bool faulty;
  if (threadIdx.x == 0) faulty = has_fault(scaling.fault);
  __syncthreads();
  const bool skips = faulty || (scaling.found_inf != nullptr && *scaling.found_inf != 0);
  double factor = scaling.gradient_factor;
  if (scaling.grad_scale != nullptr) factor /= static_cast<double>(*scaling.grad_scale);
  if (scaling.raw_norm != nullptr) {
    const double norm = (factor < 0 ? -factor : factor) * *scaling.raw_norm;
    factor *= clip_factor(norm, scaling.max_norm);
    if (scaling.norm != nullptr && threadIdx.x == 0) *scaling.norm = norm;
  }
  if (threadIdx.x == 0) *skip = skips ? 1 : 0;
  for (int i = static_cast<int>(threadIdx.x); i < schedule.count; i += kThreads) {
    const StepNumber& number = schedule.parameters[i];
    const OptimizerGroup& group = schedule.groups[number.group];
    double step = 1;
    if (number.address != nullptr && number.wide) {
      auto* const address = static_cast<double*>(number.address);
      step = *address + 1;
      if (!skips) *address = step;
    } else if (number.address != nullptr) {
      auto* const address = static_cast<float*>(number.address);
      const float next = *address + 1;
      step = static_cast<double>(next);
      if (!skips) *address = next;
    }
    const bool first = number.address != nullptr ? step <= 1 : number.first;
    Coefficients c = Rule<Coefficients>::make(group.rule, step, first);
    c.gradient_factor = factor * group.sign;
    coefficients[schedule.first_parameter + i] = c;
  }
}

template <class Coefficients>
void prepare_all(std::span<const OptimizerParameter> parameters,
                 std::span<const OptimizerGroup> groups, const Scaling& scaling,
                 Coefficients* coefficients, uint8_t* skip, void* stream) {
  for (size_t begin = 0; begin < parameters.size();) {
    Schedule schedule;
    schedule.first_parameter = static_cast<int>(begin);
    std::array<int, kGroups> known;
    int count_of_groups = 0;
    for (; begin < parameters.size() && schedule.count < kParameters; ++begin) {
      const OptimizerParameter& parameter = parameters[begin];
      int at = 0;
      while (at < count_of_groups && known[static_cast<size_t>(at)] != parameter.group) ++at;
      if (at == kGroups) break;
      if (at == count_of_groups) {
        schedule.groups[at] = groups[static_cast<size_t>(parameter.group)];
        known[static_cast<size_t>(count_of_groups++)] = parameter.group;
      }
      schedule.parameters[schedule.count++] = {parameter.step, static_cast<uint8_t>(at),
                                               parameter.wide_step, parameter.first};
    }
    launch(prepare<Coefficients>, {.threads = kThreads}, stream, schedule, scaling, coefficients,
           skip);
  }
}

size_t rounded(size_t bytes) { return (bytes + 15) / 16 * 16; }

// The workspace: coefficients, norms of LAMB, pieces, the norm of all gradients, whether to skip.
struct Arrays {
  void* coefficients;
  LambNorms* norms;
  double* pieces;
  double* norm;
  uint8_t* skip;
  size_t bytes;

  Arrays(void* workspace, size_t count, int64_t piece_count) {
    constexpr size_t kCoefficients =
        std::max({sizeof(AdamCoefficients), sizeof(LambCoefficients), sizeof(SgdCoefficients),
                  sizeof(AdagradCoefficients)});
    auto* at = static_cast<char*>(workspace);
    size_t used = 0;
    const auto take = [&](size_t size) {
      void* const address = at == nullptr ? nullptr : at + used;
      used += rounded(size);
      return address;
    };
    coefficients = take(count * kCoefficients);
    norms = static_cast<LambNorms*>(take(count * sizeof(LambNorms)));
    pieces = static_cast<double*>(take(2 * static_cast<size_t>(piece_count) * sizeof(double)));
    norm = static_cast<double*>(take(sizeof(double)));
    skip = static_cast<uint8_t*>(take(1));
    bytes = used;
  }
};

std::vector<OptimizerTensor> tensors_of(std::span<const OptimizerParameter> parameters) {
  std::vector<OptimizerTensor> tensors;
  tensors.reserve(parameters.size());
  for (const OptimizerParameter& parameter : parameters) tensors.push_back(parameter.tensor);
  return tensors;
}

}  // namespace

size_t optimizer_workspace(std::span<const OptimizerParameter> parameters) {
  return Arrays(nullptr, parameters.size(), norm_pieces(tensors_of(parameters))).bytes;
}

void optimizer_step(OptimizerKind kind, std::span<const OptimizerParameter> parameters,
                    std::span<const OptimizerGroup> groups, const OptimizerScaling& scaling,
                    void* workspace, void* stream) {
  const std::vector<OptimizerTensor> tensors = tensors_of(parameters);
  const Arrays arrays(workspace, parameters.size(), norm_pieces(tensors));
  Scaling now{scaling.gradient_factor, scaling.grad_scale, scaling.found_inf, scaling.fault};
  if (scaling.max_norm) {
    gradient_norm(tensors, arrays.pieces, arrays.norm, stream);
    now.raw_norm = arrays.norm;
    now.max_norm = *scaling.max_norm;
    now.norm = scaling.norm;
  }
  const auto prepared = [&]<class Coefficients>(Coefficients*) {
    auto* const coefficients = static_cast<Coefficients*>(arrays.coefficients);
    prepare_all(parameters, groups, now, coefficients, arrays.skip, stream);
    return CoefficientList<Coefficients>{coefficients, false};
  };
  switch (kind) {
    case OptimizerKind::adam:
      return adam_step(tensors, prepared(static_cast<AdamCoefficients*>(nullptr)), arrays.skip,
                       stream);
    case OptimizerKind::sgd:
      return sgd_step(tensors, prepared(static_cast<SgdCoefficients*>(nullptr)), arrays.skip,
                      stream);
    case OptimizerKind::adagrad:
      return adagrad_step(tensors, prepared(static_cast<AdagradCoefficients*>(nullptr)),
                          arrays.skip, stream);
    case OptimizerKind::lamb: {
      const auto c = prepared(static_cast<LambCoefficients*>(nullptr));
      lamb_moments(tensors, c, arrays.skip, arrays.pieces, arrays.norms, stream);
      return lamb_update(tensors, c, arrays.skip, arrays.norms, stream);
    }
  }
}

}  // namespace ortrain::gpu
