// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/runtime/kernel.h"

namespace ortrain {

// What a node costs by its shapes, whatever kernel runs it; for profiles.
struct NodeCost {
  double bytes = 0;  // of its inputs and outputs; of a table only the rows that are looked up
  double flops = 0;  // two per multiplication of a matrix product; 0 for everything else
};

NodeCost node_cost(const NodeSpec& spec);

}  // namespace ortrain
