// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/expr_kernels.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {

// Every operator with a formula gets the kernels that run formulas.
void register_elementwise(KernelRegistry& registry) {
  for (const OpDef* def : op_registry().all()) {
    if (!def->expression) continue;
    registry.add(def->domain.empty() ? def->name : def->domain + "::" + def->name,
                 expr_kernels(elementwise_program));
  }
}

}  // namespace ortrain::cpu
