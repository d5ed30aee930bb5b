// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::ops {

// Kernels that call functions of the process, on tensors where the registry's device has them.
void register_external_kernels(KernelRegistry& registry);

}  // namespace ortrain::ops
