// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ortrain/ir/graph.h"
#include "ortrain/runtime/block_pool.h"
#include "ortrain/runtime/execution_plan.h"
#include "ortrain/runtime/kernel_registry.h"
#include "ortrain/runtime/nan_check.h"
#include "ortrain/runtime/profiler.h"
#include "ortrain/runtime/step_recordings.h"

namespace ortrain {

// One finished graph and its execution plans, one per signature of input shapes, the least recently
// used dropped beyond a bound of what they hold; the latest stays. Thread-safe.
class Session {
 public:
  // Makes a plan of the session's graph, or of a rewritten form of it. As make_execution_plan.
  using PlanFunction = std::function<std::shared_ptr<const ExecutionPlan>(
      const Graph& graph, const std::vector<Dims>& input_dims, const KernelRegistry& kernels,
      const PlanOptions& options)>;

  struct Options {
    size_t max_plans = 512;
    size_t max_plan_bytes = size_t{256} << 20;  // by held_bytes()
    PlanOptions plan = {};
    PlanFunction make_plan = make_execution_plan;
  };

  Session(Graph graph, const KernelRegistry& kernels) : Session(std::move(graph), kernels, {}) {}
  Session(Graph graph, const KernelRegistry& kernels, Options options);

  const Graph& graph() const { return graph_; }
  // `input_dims`: one per graph input; those with role `gradient` are ignored and may be empty.
  // `was_planned` tells whether the plan had to be made.
  std::shared_ptr<const ExecutionPlan> plan(const std::vector<Dims>& input_dims,
                                            bool* was_planned = nullptr);
  size_t num_plans() const;
  // What they hold together.
  size_t plan_bytes() const;
  // The plan used last; null before the first.
  std::shared_ptr<const ExecutionPlan> latest_plan() const;

  // What its runs took while profiling() was on.
  SessionProfile& profile() const { return *profile_; }
  // ORTRAIN_CHECK_NAN was set when the session was made.
  bool checks_nan() const { return checks_nan_; }
  Device& device() const { return kernels_->device(); }
  StepRecordings& recordings() { return recordings_; }

 private:
  Graph graph_;
  const KernelRegistry* kernels_;
  Options options_;
  bool checks_nan_;
  mutable std::mutex mutex_;
  using Entry = std::pair<std::vector<Dims>, std::shared_ptr<const ExecutionPlan>>;
  std::list<Entry> plans_;  // most recently used first
  size_t plan_bytes_ = 0;
  std::map<std::vector<Dims>, std::list<Entry>::iterator> by_dims_;
  std::shared_ptr<SessionProfile> profile_;
  StepRecordings recordings_;
};

// A tensor that a run made: its memory lives as long as the block is held.
struct RunOutput {
  TensorSpec spec;
  std::shared_ptr<Block> block;
};

// Steps of a plan between which `reached` is called, with the position of the one that was reached:
// ascending, on the host behind all steps before it.
struct ForwardStops {
  std::vector<size_t> ends = {};
  std::function<void(size_t)> reached = {};
};

// One forward in flight, and its backward: owns the arena with the values saved between them.
// Several may exist at once for one session. Not thread-safe itself.
class RunContext {
 public:
  RunContext(std::shared_ptr<Session> session, std::shared_ptr<const ExecutionPlan> plan);

  const ExecutionPlan& plan() const { return *plan_; }

  // Runs the forward steps. What a kernel on a device finds wrong with values that it reads on the
  // way is thrown here, or by a later call that comes after the device was done. `inputs`: one
  // address per graph input, null for those with role `gradient`; the memory must stay valid and
  // unchanged until backward is done. Returns one entry per graph output; those with role
  // `gradient` have no block yet. `stream`: the device's queue for all work of this forward.
  // `stops`: where the caller is told how far it has come; what it throws ends the run.
  std::vector<RunOutput> forward(std::span<const void* const> inputs, void* stream = nullptr,
                                 const ForwardStops& stops = {});
  // Runs the backward steps. `gradients`: one address per graph input, null unless its role is
  // `gradient`. Returns one entry per graph output; only gradients have blocks. Afterwards the
  // context holds no memory; a second backward needs a forward first.
  std::vector<RunOutput> backward(std::span<const void* const> gradients, void* stream = nullptr);
  // The same in parts, for gradients that are wanted as soon as they are final. `begin_backward`
  // takes the addresses, `continue_backward` runs the steps before step `end` of the plan that have
  // not run, and returns the gradients that no later step touches and that were not returned yet.
  // The part with the plan's last step ends the backward.
  void begin_backward(std::span<const void* const> gradients, void* stream = nullptr);
  std::vector<RunOutput> continue_backward(size_t end);
  // Lets the rest of the backward read the same values elsewhere: the caller may change what the
  // forward read.
  void replace_input(size_t input, const void* address);
  // Between the two, or between parts.
  bool in_backward() const { return next_step_.has_value(); }
  // The first step of the plan that the backward has not run.
  size_t next_step() const { return next_step_.value_or(plan_->num_forward_steps); }
  // Values between forward and backward are held.
  bool can_run_backward() const { return arena_ != nullptr; }
  // Drops them.
  void release();
  // Adds 1 to a number on the device in each forward that ends with a fault recorded there, its own
  // or an earlier one; not in one that throws before it begins. Null for none.
  void count_faults(int64_t* count) { fault_count_ = count; }

 private:
  void run_steps(size_t begin, size_t end);
  void launch_steps(size_t begin, size_t end, void* stream);
  // Inputs whose memory is another one in each run go to a place in the arena, so that what was
  // recorded with their addresses can be launched again.
  void stage_inputs(bool gradients);
  bool records() const;
  void look_for_nan_in_inputs(bool backward);
  void refuse_nan(const std::vector<RunOutput>& outputs) const;
  std::vector<RunOutput> make_outputs();
  // Of graph outputs, by number.
  void make_blocks(std::span<const size_t> outputs);

  std::shared_ptr<Session> session_;
  std::shared_ptr<const ExecutionPlan> plan_;
  void* stream_ = nullptr;
  std::shared_ptr<Block> arena_;
  std::vector<const void*> inputs_;
  RunState state_;
  NanCheck nan_check_;
  std::vector<std::shared_ptr<Block>> output_blocks_;
  std::optional<size_t> next_step_;  // of a backward that has begun
  int64_t* fault_count_ = nullptr;
};

}  // namespace ortrain
