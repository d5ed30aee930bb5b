// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/passes/pass.h"

namespace ortrain {

// Connected elementwise nodes, casts, dropouts, broadcasts and reductions along the last axis of
// one phase become one node, whose intermediate results never reach memory:
//
//   x ─ Pow(2) ─ ReduceMean(-1) ─ Add(eps) ─ Sqrt ─ Reciprocal ─ Mul ─ Mul ─ y
//   └────────────────────────────────────────────────┘        w ─┘
//                        =>   ortrain::Fused(x, w) ─ y
//
// All nodes of a group have the same shape, or that shape with last extent 1 (one value per row),
// provably so for symbolic extents. Values that others read become outputs of the group. An Expand
// in front of an elementwise node goes away where the node broadcasts by itself. Shape arithmetic
// and what is computed from constants alone stay as they are. No result is computed twice, so
// memory traffic only falls.
Pass fuse_elementwise();

}  // namespace ortrain
