// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/passes/pass.h"

namespace ortrain {

// Where memory bounds a step, computing an element again costs less than reading it. What one
// kernel of the backward reads of a forward kernel's inside is computed again in it:
//
//   x ─ Sigmoid ─ s ─ Mul(x) ─ y                  x ─ Sigmoid ─ Mul(x) ─ y
//   │             └──────────┐             =>     │
//   └─ backward: f(dy, x, s) ┘                    └─ backward: f(dy, x, Sigmoid(x))
//
// The forward's kernel writes y alone then, and the backward's reads x and dy. A minimum cut finds
// what to keep; what it finds is taken where, for any extents, the backward keeps no more bytes
// than before, and by a nominal size fewer bytes move. Nodes that run again are elementwise, draw
// no random numbers, and stand in no checkpoint: what those keep is the user's choice. They read
// what the graph computes; inputs only where the backward reads them already, as a caller may
// write to an input, or the graph to a buffer, in between.
//
// Values that are computed again have the bits that they had: what of 16 bits was read from memory
// is rounded again, what was used unrounded inside of a kernel is not, and what can do neither is
// kept. Gradients in 16 bits may still be rounded at other places: a kernel of the backward that
// grows beyond what one can hold is cut elsewhere.
Pass recompute_elementwise();

}  // namespace ortrain
