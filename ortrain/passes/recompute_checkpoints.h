// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/passes/pass.h"

namespace ortrain {

// What the backward reads of the inside of a checkpoint is computed again from what enters it, just
// before it is read, so that it need not be kept:
//
//   x ─► [ Relu ─► a ─► Softmax ] ─► y       backward: a used
//   =>
//   x ─► [ Relu ─► a ─► Softmax ] ─► y       backward: x ─► Relu ─► a' used
//
// Values that leave the checkpoint are kept. Random numbers are drawn again from the same place in
// their stream. What runs outside of the engine runs once, and so does what updates buffers.
// (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".)
Pass recompute_checkpoints();

}  // namespace ortrain
