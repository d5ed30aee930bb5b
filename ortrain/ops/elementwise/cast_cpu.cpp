// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {

// Cast itself derives its kernels from its formula, like every elementwise operator.
void register_cast(KernelRegistry& registry) {
  registry.add("Identity", {whole_input_view()});
  registry.add("ortrain::StopGradient", {whole_input_view()});
}

}  // namespace ortrain::cpu
