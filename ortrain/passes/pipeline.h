// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ortrain/ir/graph.h"
#include "ortrain/passes/pass.h"

namespace ortrain {

struct PassResult {
  std::string name;
  bool changed = false;
  double seconds = 0;
  size_t nodes_before = 0;
  size_t nodes_after = 0;
};

struct PassInfo {
  std::string name;
  std::string stage;
  std::string summary;
};

// Runs the passes of one stage, in the order that stands in pipeline.cpp:
//   "simplify"  before gradients are built: fewer nodes, the same numbers;
//   "fuse"      afterwards, over forward and backward together.
// Passes named in ORTRAIN_DISABLE_PASSES are skipped; with ORTRAIN_VERIFY=1 the graph is verified
// after each. An error leaves with the name of the pass in front.
//
// A stage can be run in two parts, for who decides in between what to compute again: up to
// recompute_checkpoints, and what follows it. A stage without that pass is all in the first part.
enum class StagePart { whole, up_to_recompute, behind_recompute };
// What the graph is going to run on: how compute and memory compare there.
enum class Processor { cpu, gpu };
std::vector<PassResult> run_pipeline(Graph& graph, const std::string& stage,
                                     StagePart part = StagePart::whole,
                                     Processor processor = Processor::cpu);

// Every pass once, in order.
std::vector<PassInfo> all_passes();

// Adds a pass of the program's own: after those of "simplify", before those of "fuse". The graph is
// verified after each run that changed it. Throws InvalidModelError when there is no such stage, or
// a pass of this name.
void add_pass(const std::string& stage, Pass pass);
// Whether a pass of this name had been added.
bool remove_pass(const std::string& name);

// The rewrite that a budget of memory asks for (`ortrain/training/memory_budget.h`).
inline constexpr std::string_view kRecomputeForMemory = "recompute_for_memory";

// Named in ORTRAIN_DISABLE_PASSES.
bool is_disabled(const std::string& pass);

}  // namespace ortrain
