// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/rnn/recurrent_layer.cuh"

namespace ortrain::gpu {

void register_gru(KernelRegistry& registry) {
  register_recurrent<GruCell>(registry, "ortrain::GRU", [](const NodeSpec&) { return GruCell(); });
}

}  // namespace ortrain::gpu
