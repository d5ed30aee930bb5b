// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/expr_kernels.h"
#include "ortrain/ops/fused/fused_program.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {

void register_fused(KernelRegistry& registry) {
  registry.add("ortrain::Fused", expr_kernels(ops::fused_program, registry.device()));
}

}  // namespace ortrain::gpu
