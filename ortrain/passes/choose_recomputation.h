// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "ortrain/ir/graph.h"

namespace ortrain {

// What computing again costs and saves, for one set of shapes. Any unit of time.
struct RecomputeCosts {
  std::vector<double> time;   // by NodeId: of running the node again
  std::vector<double> bytes;  // by ValueId; 0 for what is there in the backward anyway
};

// Decides which values the backward finds kept and which it computes again, so that
//
//   time of all nodes that run again + sum over kept values of price * bytes
//
// is least: a minimum cut between the backward, which reads values, and time. A value that is read
// (by the backward, or by a node that runs again) is either kept or made again by its producer,
// which then reads its own inputs:
//
//   backward ──∞──► value ──price * bytes──► producer ──time──► sink
//                     ▲────────∞──────────────┘ (an input of it)
//
// `price` by ValueId: time that a byte is worth; 0 keeps the value. Returns, by ValueId, false for
// what is to be computed again; for recompute_in_backward. Checkpoints that the user has marked and
// that were expanded are nodes of the backward like others.
std::vector<bool> choose_kept_values(const Graph& graph, const RecomputeCosts& costs,
                                     const std::vector<double>& price);

// Divides the forward into `count` parts that make about equally many bytes for the backward, at
// places where few bytes are alive. Returns, by ValueId, the values that cross from one part to
// another: with these kept, each part is computed again by itself, and freed before the part in
// front of it (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
std::vector<bool> values_between_parts(const Graph& graph, const RecomputeCosts& costs, int count);

}  // namespace ortrain
