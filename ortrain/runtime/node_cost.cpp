// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/node_cost.h"

#include <algorithm>

namespace ortrain {

NodeCost node_cost(const NodeSpec& spec) {
  const OpDef& def = spec.def();
  NodeCost cost;
  double out = 0;
  for (size_t i = 0; i < spec.num_outputs(); ++i) {
    if (spec.has_output(i)) out += static_cast<double>(spec.output(i).bytes());
  }
  for (size_t i = 0; i < spec.num_inputs(); ++i) {
    if (!spec.has_input(i)) continue;
    const double in = static_cast<double>(spec.input(i).bytes());
    cost.bytes += def.looks_up && i == 0 ? std::min(in, out) : in;
  }
  cost.bytes += out;
  if (def.flops) cost.flops = def.flops(spec);
  return cost;
}

}  // namespace ortrain
