// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/ir/graph.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain {

// Throws InvalidModelError that names the node and the broken rule. The rules:
//   ids                 every node, value, input and output refers to what exists
//   names               values have names, and no two have the same
//   single assignment   a value is an input, a constant, or one output of one node
//   order               the order lists every live node once, after the nodes that it reads
//   dead reference      nobody reads a value whose node is gone
//   inference           operators, attributes, types, shapes and known contents are what the schema
//                       and inference say. Extents that only the data tell are not compared
//   phase               forward nodes read no backward values and no incoming gradients, and user
//                       outputs are none
void verify(const Graph& graph);
void verify(const Graph& graph, const OpRegistry& registry);

}  // namespace ortrain
