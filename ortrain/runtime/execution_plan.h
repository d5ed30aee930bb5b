// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ortrain/base/dim.h"
#include "ortrain/ir/graph.h"
#include "ortrain/runtime/kernel.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain {

// Where the bytes of a value are while a plan runs.
struct Location {
  enum class Kind : uint8_t { absent, input, constant, arena, output };
  Kind kind = Kind::absent;
  uint32_t index = 0;  // which graph input / constant / graph output
  size_t offset = 0;   // bytes from its start
};

struct PlanStep {
  NodeId node = kNoNode;  // kNoNode: copies into an output
  std::string kernel;     // name of the chosen kernel
  KernelFn run;
  uint32_t first_arg = 0;  // into ExecutionPlan::args: inputs, then outputs, then workspace
  uint32_t num_inputs = 0;
  uint32_t num_outputs = 0;
  std::vector<TensorSpec> outputs;           // undefined where absent; none for copies
  std::vector<std::pair<int, int>> inplace;  // (input, output) that its kernel takes in one place
  size_t workspace_bytes = 0;
  size_t kept_bytes = 0;  // by its kernel; see NodeSpec::note_kept
  double bytes = 0;       // read and written; see NodeCost
  double flops = 0;
};

// A node that only shows bytes of its first input.
struct PlanView {
  NodeId node = kNoNode;
  std::vector<int64_t> offsets;  // per output, in bytes
};

// Steps from `begin` to before `end`.
struct StepRange {
  size_t begin = 0;
  size_t end = 0;
};

// What a plan computes again in its backward so that it fits a budget of bytes.
struct RecomputationSummary {
  uint64_t budget_bytes = 0;  // that total_bytes() may take
  // Of the plan that computes nothing again.
  size_t total_bytes_without = 0;
  size_t arena_bytes_without = 0;
  std::map<std::string, int> nodes;  // that run again, by operator, before they are fused
  double bytes = 0;                  // of their results
  // What the step takes by an estimate from bytes and FLOPs, as a share of the plan without.
  double time_share = 1;
};

// Everything about running a graph with one set of input shapes: order, kernels, addresses. Made
// once, read by any number of RunContexts at a time.
struct ExecutionPlan {
  uint64_t id = 0;                  // no other plan of this process has it
  bool sizes_only = false;          // see PlanOptions: it cannot run
  std::vector<TensorSpec> inputs;   // per graph input
  std::vector<TensorSpec> outputs;  // per graph output
  // Per graph output: the graph input whose memory takes it, or -1.
  std::vector<int> updated_input;
  std::vector<PlanStep> steps;  // forward steps, then backward steps
  size_t num_forward_steps = 0;
  // No step waits for the device: stretches of them can be recorded.
  bool can_be_recorded = false;
  // Then: where in the arena, behind all else, a copy of each input has its place, or kNotStaged.
  static constexpr size_t kNotStaged = static_cast<size_t>(-1);
  std::vector<size_t> staged_inputs;
  size_t staging_bytes = 0;
  std::vector<Location> args;
  std::vector<TensorData> constants;
  PlacedConstants placed;                     // the same where the kernels read them
  std::shared_ptr<StepNumbers> step_numbers;  // null on the host
  std::vector<PlanView> views;                // in the order of the graph
  // The graph that it was made of, where that is a rewritten form of the session's: the same inputs
  // and outputs, other nodes and values.
  std::shared_ptr<const Graph> rewritten;
  std::optional<RecomputationSummary> recomputation;
  // Per graph output: from the first step that touches its block to behind the last; empty where it
  // has none. Of a gradient, to behind the last that reads the input that it is the gradient of.
  std::vector<StepRange> output_steps;

  size_t arena_bytes = 0;        // without the copies of inputs
  size_t arena_lower_bound = 0;  // bytes alive at the worst step
  size_t constant_bytes = 0;     // made while planning
  size_t forward_output_bytes = 0;
  size_t gradient_bytes = 0;
  // Memory that a forward and a backward take from the engine, before anything runs.
  size_t total_bytes() const {
    return arena_bytes + staging_bytes + constant_bytes + forward_output_bytes + gradient_bytes;
  }
  // What keeping it takes, by an estimate: constants that were made for it, steps and what their
  // kernels keep, a graph of its own.
  size_t held_bytes() const {
    constexpr size_t kPerStep = 1000, kPerNode = 1000;  // measured over small transformers
    size_t bytes = constant_bytes + args.size() * sizeof(Location) +
                   steps.size() * (sizeof(PlanStep) + kPerStep) +
                   (inputs.size() + outputs.size()) * 2 * sizeof(TensorSpec);
    for (const PlanStep& step : steps) bytes += step.kept_bytes;
    if (rewritten) bytes += rewritten->order().size() * kPerNode;
    return bytes;
  }
  // The graph whose nodes the steps name, given the session's.
  const Graph& graph_of(const Graph& session_graph) const {
    return rewritten ? *rewritten : session_graph;
  }
};

struct PlanOptions {
  // Outputs with role `state_update` or `buffer_update` are written to the memory of the input that
  // they update, where possible by the node that makes them, else at the end. Inputs must not share
  // memory then, and a run reads what the one before it wrote.
  bool updates_in_place = false;
  // A plan to read bytes and costs from: nothing is put on the device, and none of its kernels is
  // compiled.
  bool sizes_only = false;
  // Bytes that inputs and results of one node may take; more is refused, before kernels are made,
  // which may keep tables as long as an axis. 0: on the host what the machine has, elsewhere any.
  uint64_t memory_limit = 0;
};

// `input_dims` as in resolve_shapes. Without inputs of role `gradient` all nodes run in the
// forward. Throws UnsupportedError naming a node that no kernel takes, with the reason of each
// kernel, and OutOfMemoryError naming one that is beyond the memory limit.
std::shared_ptr<const ExecutionPlan> make_execution_plan(const Graph& graph,
                                                         const std::vector<Dims>& input_dims,
                                                         const KernelRegistry& kernels,
                                                         const PlanOptions& options = {});

}  // namespace ortrain
