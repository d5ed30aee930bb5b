// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/rnn/recurrent_layer.cuh"

namespace ortrain::gpu {

void register_lstm(KernelRegistry& registry) {
  register_recurrent<LstmCell>(registry, "ortrain::LSTM",
                               [](const NodeSpec&) { return LstmCell(); });
}

}  // namespace ortrain::gpu
