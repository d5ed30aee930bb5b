// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <vector>

#include "ortrain/base/dim.h"
#include "ortrain/ir/graph.h"

namespace ortrain {

// Concrete shapes of every value for one set of input shapes, each as check_extents allows.
struct ResolvedShapes {
  std::vector<Dims> dims;  // by ValueId
  // Contents of integer tensors of rank 0 or 1 that follow from the shapes alone.
  std::vector<std::optional<std::vector<int64_t>>> known;
};

// `input_dims`: one entry per Graph::inputs(), of which those with role `gradient` are filled in
// here from the outputs they belong to and may be empty. Throws ShapeError naming the input whose
// rank or extents do not fit the graph, or the node that cannot take the shapes, and
// UnsupportedError naming the node whose result extents depend on data.
ResolvedShapes resolve_shapes(const Graph& graph, const std::vector<Dims>& input_dims);

}  // namespace ortrain
