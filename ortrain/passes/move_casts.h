// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/passes/pass.h"

namespace ortrain {

// Casts go away behind one that loses nothing, and go to where fewer bytes are moved:
//
//   Cast<T> ∘ Cast<wider>  =>  Cast<T>          Cast<bfloat16> ∘ Cast<float32>  =>  the value
//   itself Cast<narrower> ∘ Transpose  =>  Transpose ∘ Cast<narrower> Transpose ∘ Cast<wider> =>
//   Cast<wider> ∘ Transpose
//
// and so across Reshape, Squeeze, Unsqueeze and Flatten. Only between floats, within one phase and
// one checkpoint, and where nobody else reads what lies between.
Pass move_casts();

// Whether a node gives input 0 in another form, element by element.
bool only_moves(const Node& node);

}  // namespace ortrain
