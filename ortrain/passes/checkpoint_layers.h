// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ortrain/ir/graph.h"

namespace ortrain {

// Makes each of the first `count` transformer layers a checkpoint (Node::checkpoint), so that
// recompute_checkpoints keeps what enters a layer alone; 0: all layers but the last, whose values
// the backward reads first in any case. Returns how many layers were made one.
//
// Layers are told by the paths of their nodes, where the parts of a list have numbers:
//
//   encoder.layer.0.attention/Softmax   encoder.layer.0.norm/LayerNormalization
//   encoder.layer.0.mlp/Gelu         => layer "encoder.layer.0"
//
// A transformer layer is the innermost numbered part with an attention, a normalization and an
// activation; numbers may stand behind slashes too, as in files of other exporters. Nodes that are
// part of a checkpoint stay in it.
int64_t checkpoint_layers(Graph& graph, int64_t count);

}  // namespace ortrain
