// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "ortrain/ir/graph.h"

namespace ortrain {

// What is computed in 16 bits. The lists name operators, "MatMul" or "ortrain::Linear", that are
// taken out of the list that their definitions (OpDef::precision) put them into.
struct MixedPrecision {
  DType dtype = DType::bf16;  // or f16
  std::vector<std::string> allow = {};
  std::vector<std::string> deny = {};
  std::vector<std::string> promote = {};
};

// A forward graph in float32 becomes one of mixed precision, as level O1 of NVIDIA's Apex has it:
// products run in 16 bits, what would lose by that in float32, the rest in the widest type that it
// is given.
//
//   x ─┐                       x ─ Cast ─┐
//      MatMul ─► Softmax ─►  =>           MatMul ─► Cast ─► Softmax ─►
//   w ─┘                       w ─ Cast ─┘
//
// Inputs and outputs keep their types, so parameters stay in float32 and so do their gradients; a
// value is cast once, however many nodes read it. Constants of one element take the type of what
// they meet, where it holds them. Values of float64 or of another 16-bit type stay as they are.
// Runs before gradients are built. Returns whether it changed anything.
// Throws InvalidModelError for a dtype that is none of 16 bits, a name that is no operator, or
// stands in two lists, or is allowed and not computed in 16 bits.
bool mixed_precision(Graph& graph, const MixedPrecision& options);

}  // namespace ortrain
