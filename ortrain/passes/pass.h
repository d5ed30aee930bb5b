// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "ortrain/ir/graph.h"

namespace ortrain {

// One rewrite of a graph. `run` returns whether it changed anything; it may leave dead nodes and
// nodes out of order, the pipeline removes and sorts them. It never changes the meaning of the
// graph outputs, and never makes a forward node read a backward value.
struct Pass {
  std::string name;     // "fuse_elementwise"; also the name in ORTRAIN_DISABLE_PASSES
  std::string summary;  // one sentence for docs/passes.md
  std::function<bool(Graph&)> run;
  // Left out on the CPU, which computes less while it moves a byte, and begins a node sooner.
  bool of_gpus = false;
  // Left out behind what a budget of memory computes again: it gains time for memory.
  bool takes_memory = false;
};

}  // namespace ortrain
