// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ortrain/ir/attribute.h"
#include "ortrain/training/memory_budget.h"

namespace ortrain {

// Parameters that an optimizer treats alike.
struct ParameterGroup {
  std::vector<std::string> parameters;  // targets
  Attributes attributes = {};           // of the optimizer's step, in place of the common ones
  double rate_factor = 1.0;             // of the learning rate
};

struct OptimizerOptions {
  // An operator of `ortrain/ops/training/optimizer_steps.cpp`: SgdStep, AdamStep, LambStep,
  // AdagradStep.
  std::string step = "AdamStep";
  Attributes attributes = {};
  // Parameters that stand in none get the common attributes.
  std::vector<ParameterGroup> groups = {};
  // The norm of all gradients is clipped to it; 0: it is not.
  double max_norm = 0.0;
};

// Elements of a parameter in row-major order, from `begin` up to `end`.
struct ParameterSlice {
  std::string parameter;  // target
  int64_t begin = 0, end = 0;
};

struct TrainingOptions {
  std::string loss;  // name of a user output, a single element
  OptimizerOptions optimizer = {};
  // Batches whose gradients are averaged before a step.
  int64_t accumulation = 1;
  // The loss is multiplied by the state `kLossScale`; a step with gradients that are not finite is
  // left out.
  bool scales_loss = false;
  // Bytes that a run may take from the engine, known before it starts; 0: any number.
  uint64_t memory_limit = 0;
  // What the plan of a run is brought down to by computing again; absent: as it comes.
  MemoryBudget budget = {};
  // Parameters that have had another number of updates than those of class 0, by classes of which
  // all have had the same.
  std::map<std::string, size_t> step_classes = {};
  // What the graph of the optimizer alone updates, where other processes do the rest: at most one
  // slice of a parameter. Absent: everything.
  std::optional<std::vector<ParameterSlice>> owned = {};
  // With `owned` and LambStep: the external function that add_lamb_steps takes; the number of a
  // slice is its place in `owned`.
  std::string sum_norms = {};
};

// State inputs of training graphs, by target. The scalars are set by whoever runs the graph.
inline constexpr const char* kLearningRate = "optimizer:rate";  // float64
inline constexpr const char* kStepNumber = "optimizer:step";    // int64, from 1
// The step number of a class of parameters: "optimizer:step" of class 0, "optimizer:step:1" and on.
std::string step_number_target(size_t step_class);
// The class of which a target is the step number.
std::optional<size_t> step_class_of(std::string_view target);
inline constexpr const char* kLossScale = "optimizer:loss_scale";  // float64
// Written by graphs that update, where there is a norm to know.
inline constexpr const char* kGradientNorm = "optimizer:gradient_norm";  // float64
inline constexpr const char* kAllFinite = "optimizer:all_finite";        // bool

// The targets of the states of a parameter: "fc.weight:exp_avg", "fc.weight:grad".
std::vector<std::string> optimizer_states(const std::string& step, const Attributes& attributes);
std::string state_target(const std::string& parameter, const std::string& state);
inline constexpr const char* kAccumulatedGradient = "grad";
// Of a slice that is updated alone: the same elements of the gradient.
inline constexpr const char* kOwnedGradient = "owned_grad";

}  // namespace ortrain
