// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "ortrain/ir/graph.h"

namespace ortrain {

// Keeps these user outputs, in this order, and drops what only the others need. Throws
// InvalidModelError naming one that there is not.
void select_outputs(Graph& graph, const std::vector<std::string>& names);

// Drops inputs of role user or seed that no node reads and no output is.
void drop_unused_inputs(Graph& graph);

// Makes ONNX's Dropout in training mode draw anew in each run: it gets the graph's seed, which is
// added where there is none, and a stream of its own.
void draw_dropout_per_run(Graph& graph);

// Turns a graph for training into one for evaluation: Dropout lets everything through, attention
// drops nothing, BatchNormalization uses its running statistics and updates them no more.
void leave_out_training(Graph& graph);

}  // namespace ortrain
