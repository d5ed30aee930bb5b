// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <vector>

#include "ortrain/ir/graph_builder.h"

namespace ortrain {

// A slice of a parameter that LAMB updates. All are vectors of its elements.
struct LambSlice {
  int64_t number = 0;  // by which the processes know it
  ValueId parameter = kNoValue, gradient = kNoValue, exp_avg = kNoValue, exp_avg_sq = kNoValue;
};

// Slices of parameters that are treated alike.
struct LambSliceGroup {
  Attributes attributes;    // of LambStep
  ValueId rate = kNoValue;  // float64
  ValueId step = kNoValue;  // int64, from 1
  std::vector<LambSlice> slices;
};

// Adds a step of LAMB and replaces parameters and states by their next values. LAMB needs the norms
// of whole parameters: the external function `sum_norms` gets the numbers of the slices, int64 [n],
// and the squares of their norms, float64 [n, 2], and gives those of the parameters. `factor`,
// `skip`: as the inputs of LambStep.
void add_lamb_steps(GraphBuilder& builder, std::span<LambSliceGroup> groups, ValueId factor,
                    ValueId skip, const std::string& sum_norms);

}  // namespace ortrain
