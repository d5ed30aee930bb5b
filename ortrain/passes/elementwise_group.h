// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "ortrain/ir/expr_builder.h"
#include "ortrain/ir/graph.h"

namespace ortrain {

// What nodes have in common that can become one Fused node.
struct ElementwiseGroup {
  Phase phase = Phase::forward;
  Shape shape;
  // Some member cannot live with one value per row: dropout counts elements, a reduction needs
  // them, and values per row are that already.
  bool needs_elements = false;
};

// The reduction of rows that an operator may stand for, whatever its axes.
std::optional<ExprOp> row_reduction_of(const Node& node);

// The group that a node makes by itself, if it can be in one; what is computed from constants alone
// is up to the caller. Otherwise `why` says why not, where it is given.
std::optional<ElementwiseGroup> group_of(const Graph& graph, const Node& node,
                                         std::string* why = nullptr);

// The group of both, if their shapes are equal or one has a value per row of the other. Otherwise
// `why` says why not.
std::optional<ElementwiseGroup> join_groups(const ElementwiseGroup& a, const ElementwiseGroup& b,
                                            const char*& why);

}  // namespace ortrain
