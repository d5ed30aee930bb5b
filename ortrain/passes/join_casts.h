// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/passes/pass.h"

namespace ortrain {

// Under autocast a step begins with a cast of each weight and bias, most of which take less time
// than their launch. Casts of graph inputs that follow each other go together:
//
//   w1 ─ Cast ─ a                     w1 ┐          ┌ a
//   w2 ─ Cast ─ b             =>      w2 ┼ CastEach ┼ b
//   w3 ─ Cast ─ c                     w3 ┘          └ c
//
// in groups that make 32 MiB at most, since a result is made earlier than its reader needs it; a
// larger one gains nothing and stays alone. Of the forward and outside of checkpoints, with extents
// that are known. Left out under a budget of memory: a result then lives longer than it has to.
Pass join_casts();

}  // namespace ortrain
