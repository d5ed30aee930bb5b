// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ortrain/ir/graph.h"
#include "ortrain/runtime/session.h"

namespace ortrain::fuzz {

// What happens to a graph that a reader has taken: it is verified, simplified, differentiated,
// fused and planned at extents that `seed` draws; small plans run, forward and backward, on
// contents that it draws too. Throws what is a finding.
void exercise_graph(const Graph& graph, uint64_t seed);

// Parts of it. Appends the backward of what can be trained; throws UnsupportedError where nothing
// can.
void differentiate(Graph& graph);
// `plans`: what makes the plan. `repeats`: that operators give the same results each time, so that
// runs can be compared.
void plan_and_run(Graph graph, uint64_t seed, const Session::PlanFunction& plans, bool repeats);

}  // namespace ortrain::fuzz
