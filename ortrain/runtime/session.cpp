// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/session.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/base/flags.h"

namespace ortrain {

Session::Session(Graph graph, const KernelRegistry& kernels, Options options)
    : graph_(std::move(graph)),
      kernels_(&kernels),
      options_(std::move(options)),
      checks_nan_(flag_is_on("ORTRAIN_CHECK_NAN")),
      profile_(make_profile(graph_.name)) {
  check(options_.max_plans > 0, "a session keeps at least one plan");
}

std::shared_ptr<const ExecutionPlan> Session::plan(const std::vector<Dims>& input_dims,
                                                   bool* was_planned) {
  std::lock_guard lock(mutex_);
  if (was_planned != nullptr) *was_planned = false;
  if (auto found = by_dims_.find(input_dims); found != by_dims_.end()) {
    plans_.splice(plans_.begin(), plans_, found->second);
    return plans_.front().second;
  }
  if (was_planned != nullptr) *was_planned = true;
  const std::shared_ptr<void> scope = device().enter();
  std::shared_ptr<const ExecutionPlan> made =
      options_.make_plan(graph_, input_dims, *kernels_, options_.plan);
  plans_.emplace_front(input_dims, made);
  by_dims_[input_dims] = plans_.begin();
  plan_bytes_ += made->held_bytes();
  recordings_.admit(made->id);
  while (plans_.size() > 1 &&
         (plans_.size() > options_.max_plans || plan_bytes_ > options_.max_plan_bytes)) {
    by_dims_.erase(plans_.back().first);
    recordings_.drop(plans_.back().second->id);
    plan_bytes_ -= plans_.back().second->held_bytes();
    plans_.pop_back();
  }
  return made;
}

size_t Session::num_plans() const {
  std::lock_guard lock(mutex_);
  return plans_.size();
}

size_t Session::plan_bytes() const {
  std::lock_guard lock(mutex_);
  return plan_bytes_;
}

std::shared_ptr<const ExecutionPlan> Session::latest_plan() const {
  std::lock_guard lock(mutex_);
  return plans_.empty() ? nullptr : plans_.front().second;
}

RunContext::RunContext(std::shared_ptr<Session> session, std::shared_ptr<const ExecutionPlan> plan)
    : session_(std::move(session)), plan_(std::move(plan)) {
  check(!plan_->sizes_only, "a plan for sizes alone cannot run");
}

std::vector<RunOutput> RunContext::make_outputs() {
  const std::vector<GraphOutput>& outputs = session_->graph().outputs();
  output_blocks_.assign(outputs.size(), nullptr);
  std::vector<RunOutput> result(outputs.size());
  std::vector<size_t> wanted;
  for (size_t k = 0; k < outputs.size(); ++k) {
    result[k].spec = plan_->outputs[k];
    if (outputs[k].role == OutputRole::gradient || plan_->updated_input[k] >= 0) continue;
    wanted.push_back(k);
  }
  make_blocks(wanted);
  for (size_t k : wanted) result[k].block = output_blocks_[k];
  return result;
}

void RunContext::make_blocks(std::span<const size_t> outputs) {
  std::vector<const TensorSpec*> specs;
  specs.reserve(outputs.size());
  for (size_t k : outputs) specs.push_back(&plan_->outputs[k]);
  std::vector<std::shared_ptr<Block>> blocks = session_->device().results(specs, stream_);
  for (size_t i = 0; i < outputs.size(); ++i) output_blocks_[outputs[i]] = std::move(blocks[i]);
}

std::vector<RunOutput> RunContext::forward(std::span<const void* const> inputs, void* stream,
                                           const ForwardStops& stops) {
  check(inputs.size() == plan_->inputs.size(), "one address per graph input is needed");
  release();
  Device& device = session_->device();
  const std::shared_ptr<void> scope = device.enter();
  device.raise_faults();
  stream_ = stream;
  inputs_.assign(inputs.begin(), inputs.end());
  arena_ = device.arena(std::max<size_t>(plan_->arena_bytes + plan_->staging_bytes, 64), stream_);
  stage_inputs(false);
  std::vector<RunOutput> result = make_outputs();
  nan_check_ = NanCheck(device, stream_);
  look_for_nan_in_inputs(false);
  try {
    size_t begin = 0;
    for (size_t i = 0; i < stops.ends.size(); ++i) {
      const size_t end = std::min(std::max(stops.ends[i], begin), plan_->num_forward_steps);
      run_steps(begin, end);
      begin = end;
      device.synchronize(stream_);
      device.raise_faults();
      stops.reached(i);
    }
    run_steps(begin, plan_->num_forward_steps);
    if (fault_count_ != nullptr) device.count_if_faulty(fault_count_, stream_);
    refuse_nan(result);
    device.raise_faults();
  } catch (...) {
    release();
    throw;
  }
  // Without a backward half nothing has to be kept; one that gives no gradient is still asked for.
  const std::vector<GraphInput>& declared = session_->graph().inputs();
  const bool has_backward = std::any_of(declared.begin(), declared.end(), [](const GraphInput& i) {
    return i.role == InputRole::gradient;
  });
  if (!has_backward) release();
  return result;
}

std::vector<RunOutput> RunContext::backward(std::span<const void* const> gradients, void* stream) {
  begin_backward(gradients, stream);
  return continue_backward(plan_->steps.size());
}

void RunContext::begin_backward(std::span<const void* const> gradients, void* stream) {
  check(can_run_backward() && !in_backward(), "backward needs a forward first");
  check(gradients.size() == plan_->inputs.size(), "one address per graph input is needed");
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (session_->graph().inputs()[i].role == InputRole::gradient) inputs_[i] = gradients[i];
  }
  const std::shared_ptr<void> scope = session_->device().enter();
  session_->device().raise_faults();
  stream_ = stream;
  stage_inputs(true);
  look_for_nan_in_inputs(true);
  next_step_ = plan_->num_forward_steps;
}

std::vector<RunOutput> RunContext::continue_backward(size_t end) {
  check(in_backward(), "continue_backward needs begin_backward first");
  const size_t begin = *next_step_;
  Device& device = session_->device();
  const std::shared_ptr<void> scope = device.enter();
  end = std::min(std::max(end, begin), plan_->steps.size());
  const std::vector<GraphOutput>& outputs = session_->graph().outputs();
  std::vector<RunOutput> result(outputs.size());
  const bool last = end == plan_->steps.size();
  std::vector<size_t> wanted, finished;
  for (size_t k = 0; k < outputs.size(); ++k) {
    result[k].spec = plan_->outputs[k];
    if (outputs[k].role != OutputRole::gradient || plan_->updated_input[k] >= 0) continue;
    const StepRange touched = plan_->output_steps[k];
    if (touched.begin < end && touched.end > begin && output_blocks_[k] == nullptr) {
      wanted.push_back(k);
    }
    if (touched.end > begin && touched.end <= end) finished.push_back(k);
  }
  make_blocks(wanted);
  for (size_t k : finished) result[k].block = output_blocks_[k];
  try {
    run_steps(begin, end);
    refuse_nan(result);
    device.raise_faults();
  } catch (...) {
    release();
    throw;
  }
  next_step_ = end;
  for (size_t k = 0; k < outputs.size(); ++k) {
    if (result[k].block != nullptr) output_blocks_[k].reset();
  }
  if (last) release();
  return result;
}

void RunContext::replace_input(size_t input, const void* address) {
  check(can_run_backward(), "inputs are replaced between forward and backward, or between parts");
  check(input < inputs_.size(), "an input is replaced that the graph does not have");
  const bool is_staged = records() && plan_->staged_inputs[input] != ExecutionPlan::kNotStaged;
  if (!is_staged) inputs_[input] = address;
}

void RunContext::look_for_nan_in_inputs(bool backward) {
  if (!session_->checks_nan()) return;
  const Graph& graph = session_->graph();
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const GraphInput& input = graph.inputs()[i];
    if ((input.role == InputRole::gradient) != backward) continue;
    nan_check_.see_input(graph, input, plan_->inputs[i], inputs_[i]);
  }
}

void RunContext::refuse_nan(const std::vector<RunOutput>& outputs) const {
  if (!session_->checks_nan()) return;
  for (size_t k = 0; k < outputs.size(); ++k) {
    if (outputs[k].block == nullptr) continue;
    nan_check_.require_numbers(session_->graph().outputs()[k], outputs[k].spec,
                               outputs[k].block->data());
  }
}

void RunContext::release() {
  arena_.reset();
  output_blocks_.clear();
  inputs_.clear();
  state_.kept.clear();
  next_step_.reset();
}

void RunContext::stage_inputs(bool gradients) {
  if (!records()) return;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const bool is_gradient = session_->graph().inputs()[i].role == InputRole::gradient;
    const size_t offset = plan_->staged_inputs[i];
    if (is_gradient != gradients || offset == ExecutionPlan::kNotStaged || !inputs_[i]) continue;
    void* const place = static_cast<char*>(arena_->data()) + offset;
    session_->device().copy(place, inputs_[i], plan_->inputs[i].bytes(), stream_);
    inputs_[i] = place;
  }
}

bool RunContext::records() const {
  return plan_->can_be_recorded && !profiling() && !session_->checks_nan() &&
         flag_is_on("ORTRAIN_GPU_GRAPHS");
}

void RunContext::run_steps(size_t begin, size_t end) {
  if (begin == end || !records()) {
    launch_steps(begin, end, stream_);
    return;
  }
  std::vector<const void*> addresses = inputs_;
  addresses.push_back(arena_->data());
  for (const std::shared_ptr<Block>& block : output_blocks_) {
    addresses.push_back(block ? block->data() : nullptr);
  }
  session_->recordings().run(session_->device(), {plan_->id, begin, end}, std::move(addresses),
                             stream_, [&](void* stream) { launch_steps(begin, end, stream); });
}

void RunContext::launch_steps(size_t begin, size_t end, void* stream) {
  using Clock = std::chrono::steady_clock;
  Device& device = session_->device();
  const bool profile = profiling();
  const bool checks_nan = session_->checks_nan();
  const Graph& graph = plan_->graph_of(session_->graph());
  char* const arena = static_cast<char*>(arena_->data());
  const auto address = [&](const Location& location) -> void* {
    switch (location.kind) {
      case Location::Kind::absent:
        return nullptr;
      case Location::Kind::input:
        return const_cast<char*>(static_cast<const char*>(inputs_[location.index])) +
               location.offset;
      case Location::Kind::constant:
        return const_cast<char*>(
                   static_cast<const char*>(plan_->placed.addresses[location.index])) +
               location.offset;
      case Location::Kind::arena:
        return arena + location.offset;
      case Location::Kind::output:
        return static_cast<char*>(output_blocks_[location.index]->data()) + location.offset;
    }
    return nullptr;
  };
  Fault* const fault = device.fault_slot();
  const uint32_t first_number = plan_->step_numbers ? plan_->step_numbers->first() : 0;
  std::vector<void*> args(16);
  for (size_t s = begin; s < end; ++s) {
    const PlanStep& step = plan_->steps[s];
    const size_t count = size_t{step.num_inputs} + step.num_outputs + 1;
    if (args.size() < count) args.resize(count);
    for (size_t i = 0; i < count; ++i) args[i] = address(plan_->args[step.first_arg + i]);
    const KernelArgs kernel_args{.in = args.data(),
                                 .out = args.data() + step.num_inputs,
                                 .workspace = args[count - 1],
                                 .run = &state_,
                                 .stream = stream,
                                 .fault = fault,
                                 .step = first_number + static_cast<uint32_t>(s)};
    if (profile) {
      device.synchronize(stream);
      const Clock::time_point start = Clock::now();
      step.run(kernel_args);
      device.synchronize(stream);
      const auto nanoseconds = [](Clock::duration time) {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
      };
      session_->profile().record(graph, *plan_, s, nanoseconds(start.time_since_epoch()),
                                 nanoseconds(Clock::now() - start));
    } else {
      step.run(kernel_args);
    }
    if (checks_nan && step.node != kNoNode) {
      nan_check_.see_node(graph.node(step.node), step.outputs, kernel_args.out);
    }
  }
}

}  // namespace ortrain
