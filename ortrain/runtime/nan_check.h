// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>

#include "ortrain/ir/graph.h"
#include "ortrain/ir/node_spec.h"

namespace ortrain {

// Follows one run and remembers where the first NaN came from (ORTRAIN_CHECK_NAN). Values that
// nothing reads, or that a mask hides, may hold NaN in a sound model: only a result of the graph
// that holds one is an error.
class NanCheck {
 public:
  // An input of the graph, before the first node runs.
  void see_input(const Graph& graph, const GraphInput& input, const TensorSpec& spec,
                 const void* data);
  // What a node has made: one address per output, null where it is absent.
  void see_node(const Node& node, std::span<const TensorSpec> specs, void* const* outputs);
  // Throws NanError naming the result and the node or input of the first NaN.
  void require_numbers(const GraphOutput& output, const TensorSpec& spec, const void* data) const;

 private:
  std::string first_;  // empty until there is one
};

}  // namespace ortrain
