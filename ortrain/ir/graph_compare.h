// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <set>
#include <string>

#include "ortrain/ir/graph.h"

namespace ortrain {

struct CompareOptions {
  // false: names of the graph, of computed values, constants and nodes may differ.
  bool names = true;
};

// What differs first between two graphs, "" when they are equal: inputs, nodes in order,
// attributes, constants, outputs, types and shapes. Ids, and constants that nobody reads, play no
// part.
std::string first_difference(const Graph& a, const Graph& b, const CompareOptions& options = {});

// The symbols that occur in the shapes of the inputs.
std::set<std::string> input_symbols(const Graph& graph);
// False when the extents cannot be equal: they differ by a constant, or they differ and consist of
// `free_symbols` alone. Other symbols stand for what only the data tell, and carry no fixed name.
bool extents_agree(const Dim& a, const Dim& b, const std::set<std::string>& free_symbols);
bool shapes_agree(const Shape& a, const Shape& b, const std::set<std::string>& free_symbols);

}  // namespace ortrain
