// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "ortrain/ir/graph.h"

namespace ortrain {

struct BackwardOptions {
  // Positions in Graph::outputs() of the user outputs for which gradients will come in.
  std::vector<size_t> output_indices;
  // Values of the graph that are these gradients, in the same order; empty: inputs of their own.
  std::vector<ValueId> gradients = {};
};

// Appends the gradient of `graph` by reverse accumulation:
//   - a graph input with role `gradient` for each output asked for, of the output's type and shape,
//     unless the gradient is given;
//   - backward nodes, built by each operator's own rule, only along paths from those outputs to
//     inputs with `requires_grad`;
//   - a graph output with role `gradient` (target = the input's name) for each such input that a
//     path reaches. An input that no path reaches gets none.
// Contributions to one value are summed in a fixed order. Throws UnsupportedError naming operator
// and layer if a gradient is needed that an operator has no rule for.
void build_backward(Graph& graph, const BackwardOptions& options);

// Operators on a gradient path without a rule, as "op 'layer'"; empty = differentiable.
std::vector<std::string> missing_gradients(const Graph& graph, const BackwardOptions& options);

// For each user output, in order, whether it depends on an input with `requires_grad`.
std::vector<bool> differentiable_outputs(const Graph& graph);

// For each user output, in order, the names of the inputs with `requires_grad` that it depends on
// through operators that pass gradients on.
std::vector<std::vector<std::string>> gradient_paths(const Graph& graph);

// The same through any operators: inputs whose values it may depend on, not their extents alone.
std::vector<std::vector<std::string>> value_paths(const Graph& graph);

// The inputs that the graph writes to, where the value written depends on an input that requires a
// gradient: the backward of this graph does not know of it. Buffers are written to under no_grad.
std::vector<std::string> differentiable_input_updates(const Graph& graph);

}  // namespace ortrain
