// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/expr_kernels.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

// Inputs of the result's type may share its memory: equal bytes then mean equal shapes.
std::vector<std::pair<int, int>> inplace_pairs(const OpDef& def) {
  std::vector<std::pair<int, int>> pairs;
  for (size_t i = 0; i < def.inputs.size(); ++i) {
    if (def.inputs[i].type != def.outputs[0].type) continue;
    pairs.emplace_back(static_cast<int>(i), 0);
    if (def.inputs[i].arity == Arity::variadic) pairs.emplace_back(static_cast<int>(i) + 1, 0);
  }
  return pairs;
}

}  // namespace

// Every operator with a formula gets the kernels that run formulas.
void register_elementwise(KernelRegistry& registry) {
  for (const OpDef* def : op_registry().all()) {
    if (!def->expression) continue;
    registry.add(def->domain.empty() ? def->name : def->domain + "::" + def->name,
                 expr_kernels(elementwise_program, inplace_pairs(*def)));
  }
}

}  // namespace ortrain::cpu
