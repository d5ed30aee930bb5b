// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "ortrain/ir/graph.h"

namespace ortrain {

// Drops outputs that are no user's: what the model writes to buffers and arguments.
void drop_updates(Graph& graph);

// Keeps these user outputs, in this order, and drops what only the others need. Throws
// InvalidModelError naming one that there is not.
void select_outputs(Graph& graph, const std::vector<std::string>& names);

// Makes a value of the graph a user output of its name, if it is none yet. Throws InvalidModelError
// where there is no such value.
void expose_value(Graph& graph, const std::string& name);

// Drops inputs of role user or seed that no node reads and no output is.
void drop_unused_inputs(Graph& graph);

// Makes ONNX's Dropout in training mode draw anew in each run: it gets the graph's seed, which is
// added where there is none, and a stream of its own.
void draw_dropout_per_run(Graph& graph);

// ONNX's BatchNormalization nodes that normalize by the batch.
std::vector<NodeId> batch_normalizations_in_training(const Graph& graph);

// Turns a graph for training into one for evaluation: Dropout lets everything through, attention
// drops nothing, BatchNormalization uses its running statistics and updates them no more.
void leave_out_training(Graph& graph);

// Turns a graph for evaluation into one for other programs: these of its user outputs (empty: all),
// standard operators, the inputs that are needed. Throws what to_standard_operators and
// select_outputs throw.
void prepare_for_others(Graph& graph, const std::vector<std::string>& outputs);

}  // namespace ortrain
