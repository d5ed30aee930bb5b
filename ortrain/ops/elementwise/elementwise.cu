// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/expr_kernels.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ops/elementwise/dropout_program.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {

// Every operator with a formula, and the standard Dropout, which makes its own.
void register_elementwise(KernelRegistry& registry) {
  for (const OpDef* def : op_registry().all()) {
    if (!def->expression) continue;
    registry.add(def->domain.empty() ? def->name : def->domain + "::" + def->name,
                 expr_kernels(elementwise_program, registry.device()));
  }
  registry.add("Dropout", expr_kernels(ops::onnx_dropout_program, registry.device()));
}

}  // namespace ortrain::gpu
