// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/external/external_kernels.h"

namespace ortrain::gpu {

void register_external(KernelRegistry& registry) { ops::register_external_kernels(registry); }

}  // namespace ortrain::gpu
