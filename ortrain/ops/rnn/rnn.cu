// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/rnn/recurrent_layer.cuh"

namespace ortrain::gpu {

void register_rnn(KernelRegistry& registry) {
  register_recurrent<PlainCell>(registry, "ortrain::RNN", [](const NodeSpec& spec) {
    return PlainCell{.relu = spec.attrs().string_("activation") == "relu"};
  });
}

}  // namespace ortrain::gpu
