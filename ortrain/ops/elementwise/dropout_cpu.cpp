// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/expr_kernels.h"
#include "ortrain/ops/elementwise/dropout_program.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {

void register_dropout(KernelRegistry& registry) {
  registry.add("Dropout", expr_kernels(ops::onnx_dropout_program));
}

}  // namespace ortrain::cpu
