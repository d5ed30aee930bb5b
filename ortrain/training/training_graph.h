// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/ir/graph.h"
#include "ortrain/passes/pipeline.h"
#include "ortrain/training/training_options.h"

namespace ortrain {

// What one run of a training graph does with the gradients of its batch.
enum class StepKind {
  whole,  // updates the parameters with them
  first,  // keeps them
  next,   // adds them to those that are kept
  last,   // adds them, and updates
};

// The forward, the loss, the backward and, by `kind`, the optimizer in one graph:
//   - `model` has the loss among its user outputs, and inputs of role parameter; those with
//     `requires_grad` are trained where the loss depends on them;
//   - gradients are those of the loss divided by `accumulation`, and times the loss scale;
//   - new parameters, optimizer states and kept gradients are outputs of role state_update, with
//     inputs of role state for the latter two; run with PlanOptions::updates_in_place;
//   - without a norm to know, each large parameter is updated as soon as its gradient is there and
//     nothing reads its old value any more, so that gradients do not live together.
// Throws InvalidModelError for a loss that is none, for groups that name no parameter, or one
// twice; UnsupportedError as build_backward.
// `fused`: rewritten by the stage "fuse", as it runs on `processor`.
Graph make_training_graph(const Graph& model, const TrainingOptions& options, StepKind kind,
                          bool fused = true, Processor processor = Processor::cpu);

// Whether the graph of a kind updates each large parameter as soon as its gradient is there.
bool updates_as_gradients_come(const TrainingOptions& options, StepKind kind);
// Puts the steps of the optimizer in such a graph behind the last node that makes what they read,
// or reads what they overwrite.
void update_as_gradients_come(Graph& graph);

// Puts what adds a gradient to those before it, or converts it, behind the node that makes the
// gradient: it is final then, and the collectives of several processes can take it.
void keep_gradients_as_they_come(Graph& graph);

// The optimizer alone: reads kept gradients, updates the parameters. With `options.owned` it
// updates slices: parameters, their states, and gradients of kind kOwnedGradient are vectors of
// their elements; kept gradients are whole, and inputs only where their norm is needed. Throws
// InvalidModelError for a slice that does not lie in its parameter, or is the second one of it.
Graph make_optimizer_graph(const Graph& model, const TrainingOptions& options, bool fused = true);

// The forward alone, buffers as they are.
Graph make_evaluation_graph(const Graph& model);

// The targets of the parameters that training changes, in the order of the graph's inputs.
std::vector<std::string> trained_parameters(const Graph& model, const TrainingOptions& options);

}  // namespace ortrain
