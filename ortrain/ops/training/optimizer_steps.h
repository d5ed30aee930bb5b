// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string_view>

#include "ortrain/base/error.h"
#include "ortrain/ir/attribute_reader.h"

namespace ortrain::ops {

// Inputs of the optimizer steps: rate, step number, factor of the gradients, whether to skip; then
// all parameters, all gradients, and all of each kind of state. Outputs: parameters and states.
inline constexpr size_t kStepScalars = 4;

// How many kinds of state an optimizer step has.
inline size_t num_states(std::string_view op, const AttributeReader& attrs) {
  if (op == "SgdStep") return attrs.float_("momentum") != 0.0 ? 1 : 0;
  return op == "AdagradStep" ? 1 : 2;
}

// Where the tensors of a step with `num_inputs` inputs are.
struct StepLayout {
  size_t states;
  size_t count;

  StepLayout(size_t num_inputs, size_t num_states) : states(num_states), count(0) {
    const size_t kinds = 2 + states;
    if (num_inputs < kStepScalars || (num_inputs - kStepScalars) % kinds != 0) {
      throw InvalidModelError(str("takes ", kStepScalars, " scalars and ", kinds,
                                  " tensors for each parameter, has ", num_inputs, " inputs"));
    }
    count = (num_inputs - kStepScalars) / kinds;
  }
  size_t parameter(size_t i) const { return kStepScalars + i; }
  size_t gradient(size_t i) const { return kStepScalars + count + i; }
  size_t state(size_t kind, size_t i) const { return kStepScalars + (2 + kind) * count + i; }
  size_t new_parameter(size_t i) const { return i; }
  size_t new_state(size_t kind, size_t i) const { return (1 + kind) * count + i; }
};

}  // namespace ortrain::ops
