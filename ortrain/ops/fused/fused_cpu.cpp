// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/expr_kernels.h"
#include "ortrain/ops/fused/fused_program.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {

void register_fused(KernelRegistry& registry) {
  registry.add("ortrain::Fused", expr_kernels(ops::fused_program));
}

}  // namespace ortrain::cpu
