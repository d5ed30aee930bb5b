// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/passes/pass.h"

namespace ortrain {

// Attention reads and writes rows of whole tokens, so the transposes around it go away:
//
//   x[b, s, h, d] ─► Transpose(0, 2, 1, 3) ─┐ (q, k and v)
//                                           Attention ─► Transpose(0, 2, 1, 3) ─► y[b, s, h, d]
//     =>
//   x ─► Reshape[b, s, h * d] ─► Attention {q_num_heads = h} ─► Reshape ─► y
//
// It needs h and d to be integers, and nobody else to read the attention's result. Before gradients
// are built: their attention has the same layout.
Pass merge_attention_heads();

}  // namespace ortrain
