// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "ortrain/ir/graph.h"
#include "ortrain/ir/op_registry.h"

// The readable form of a graph, both ways: parse_graph(print_graph(g)) equals g.
//
//   graph mlp (float32[b, 128] x, float32[128, 64] w [parameter "fc.weight" grad],
//              int64[] s [seed], float32[b, 64] dy [gradient y])
//       => (y, m as new_mean [buffer_update "bn.running_mean"], dw as "fc.weight.grad" [gradient
//       w]) {
//     const c = float32[2] {1, 0.5}
//     h = MatMul(x, w) @fc/MatMul        # float32[b, 64]
//     y, _ = Dropout <axis = -1> (h, _, float32 0.5)
//     z = ortrain::Own <f = 1.0, is = [1, 2], e: floats = [], t = int64[2] {1, 2}> (y)
//   backward:
//     dw = ...
//   }
//
// - Names are bare ([A-Za-z_/][A-Za-z0-9_./]*) or in double quotes with \" \\ \n \t \r \xHH.
// - `_` is an absent input or an output nobody wants. `@name` is the node's name (layer path).
// - `~3` at the end of a forward node: it is part of checkpoint 3.
// - `forward:` and `backward:` set the phase of the nodes that follow; it starts as forward.
// - [role target grad]: roles are those of InputRole and OutputRole; `user` may be left out. A
//   parameter, buffer or state without a target gets the name of its value as the target.
// - A tensor is `type[dims] {elements}`; a scalar may be written `type element`. `{x, ...}` repeats
//   x; `b64 "..."` holds raw bytes. A tensor may stand for an input of a node, as an unnamed
//   constant. A float element 0x... is its bit pattern (a NaN with a payload).
// - The kind of an attribute follows from the value and the operator's schema; `name: kind = value`
//   states it. A float attribute has a point, an exponent, `inf` or `nan`.
// - `#` begins a comment.

namespace ortrain {

struct TextOptions {
  // Type and shape of the outputs of each node, as comments.
  bool types = true;
  // Constants with more elements than this are written as `b64 "..."`.
  size_t max_listed_elements = 64;
  // Write `{...}` for those constants instead: short, but parse_graph refuses it.
  bool elide_large_constants = false;
};

std::string print_graph(const Graph& graph, const TextOptions& options = {});

// Types and shapes of computed values are inferred with `registry`. Throws InvalidModelError with
// "line:column: " in front for errors of syntax and structure; errors of inference keep their type
// and get the same prefix.
Graph parse_graph(std::string_view text);
Graph parse_graph(std::string_view text, const OpRegistry& registry);

}  // namespace ortrain
