// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "ortrain/ir/graph.h"

namespace ortrain {

// Whether running a forward node twice gives the same numbers and does nothing else. Operators of
// the engine's own do: their random numbers come from the seed and a stream. What runs outside of
// the engine runs once, and of the operators of others those that draw random numbers.
bool can_run_again(const Node& node);

// Whether a node needs the extents of its inputs only, so that they need not be there.
bool reads_shapes_only(const Node& node);

// What backward nodes read of values that are not kept is computed again from kept ones: copies of
// the forward nodes, of phase backward, at most one of each. Sorting the graph then puts them right
// before the first node that reads them. Values beyond the end of `is_kept` (by ValueId) are kept;
// the producers of the others have phase forward and can_run_again. Returns the nodes that were
// copied; the originals may be dead then.
std::vector<NodeId> recompute_in_backward(Graph& graph, const std::vector<bool>& is_kept);

}  // namespace ortrain
