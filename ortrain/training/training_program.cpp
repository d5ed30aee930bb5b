// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/training_program.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "ortrain/base/error.h"
#include "ortrain/ir/roles.h"
#include "ortrain/passes/pipeline.h"
#include "ortrain/runtime/backward_parts.h"

namespace ortrain {
namespace {

size_t count_user_outputs(const Graph& graph) {
  return static_cast<size_t>(std::ranges::count_if(
      graph.outputs(), [](const GraphOutput& output) { return output.role == OutputRole::user; }));
}

void require_fit(const Value& declared, const TensorSpec& given, const std::string& what) {
  if (declared.dtype != given.dtype) {
    throw DTypeError(
        str(what, " is ", name_of(given.dtype), ", expected ", name_of(declared.dtype)));
  }
  bool fits = declared.shape.size() == given.dims.size();
  for (size_t i = 0; fits && i < given.dims.size(); ++i) {
    fits = !declared.shape[i].is_constant() || declared.shape[i].is(given.dims[i]);
  }
  if (!fits) {
    throw ShapeError(
        str(what, " has shape ", dims_str(given.dims), ", expected ", shape_str(declared.shape)));
  }
}

Dims concrete(const Shape& shape, const std::string& what) {
  Dims dims;
  for (const Dim& extent : shape) {
    if (!extent.is_constant())
      throw ShapeError(str(what, " has the open shape ", shape_str(shape)));
    dims.push_back(extent.constant());
  }
  return dims;
}

// Numbers that a step reads and writes, by target.
std::optional<DType> type_of_number(std::string_view target) {
  if (step_class_of(target)) return DType::i64;
  if (target == kAllFinite) return DType::boolean;
  if (target == kLearningRate || target == kLossScale || target == kGradientNorm) {
    return DType::f64;
  }
  return std::nullopt;
}

// Files may say anything of inputs and outputs; what gradients and steps are made of is checked
// here, and user outputs stand first, where callers look for them.
Graph checked(Graph graph) {
  for (const GraphInput& input : graph.inputs()) {
    const Value& value = graph.value(input.value);
    if (input.role == InputRole::gradient || input.role == InputRole::derived) {
      throw InvalidModelError(str("input '", value.name, "' has the role ", name_of(input.role),
                                  ", which no step gives a value"));
    }
    if (input.role != InputRole::state) continue;
    if (const std::optional<DType> dtype = type_of_number(input.target)) {
      require_fit(value, {*dtype, {}}, "'" + input.target + "'");
    }
  }
  std::ranges::stable_partition(
      graph.outputs(), [](const GraphOutput& output) { return output.role == OutputRole::user; });
  return graph;
}

void require_tensors_of(const Graph& graph, const TrainingState& state) {
  for (const GraphInput& input : graph.inputs()) {
    if (input.role != InputRole::parameter && input.role != InputRole::buffer) continue;
    const auto found = state.tensors.find(input.target);
    if (found == state.tensors.end()) {
      throw InvalidModelError(str("there is no value for '", input.target, "'"));
    }
    require_fit(graph.value(input.value), found->second.spec, "'" + input.target + "'");
  }
}

// A parameter, buffer or state of the graph; a state is made, as zeros, where there is none.
const MutableTensor& kept_tensor(TrainingState& state, const GraphInput& input,
                                 const Value& value) {
  auto& tensors = input.role == InputRole::state ? state.optimizer : state.tensors;
  const auto found = tensors.find(input.target);
  if (found != tensors.end()) return found->second;
  if (input.role != InputRole::state) {
    throw InvalidModelError(str("there is no value for '", input.target, "'"));
  }
  const Dims shape = concrete(value.shape, "state '" + input.target + "'");
  state.begin_state(input.target);
  return tensors.emplace(input.target, MutableTensor::zeros({value.dtype, shape}, *state.device))
      .first->second;
}

// What a step reads and gives beside tensors.
struct StepNumbersOfRun {
  int64_t seed = 0;
  double learning_rate = 0;
  double loss_scale = 1;
  double gradient_norm = 0;
  bool all_finite = true;
};

bool keeps_gradients(size_t which) {
  return which == static_cast<size_t>(StepKind::first) ||
         which == static_cast<size_t>(StepKind::next);
}

// Inputs that lie in memory that the step writes to would change while they are read.
void refuse_shared_memory(const Graph& graph, const TrainingState& state,
                          std::span<const InputTensor> inputs) {
  size_t next = 0;
  for (const GraphInput& input : graph.inputs()) {
    if (input.role != InputRole::user) continue;
    const InputTensor& given = inputs[next++];
    const auto* const begin = static_cast<const char*>(given.data);
    const auto* const end = begin + given.spec.bytes();
    for (const auto& [name, tensor] : state.tensors) {
      const auto* const data = static_cast<const char*>(tensor.data);
      if (begin < data + tensor.spec.bytes() && data < end) {
        throw UnsupportedError(str("input '", graph.value(input.value).name,
                                   "' lies in the memory of '", name, "'; pass a copy"));
      }
    }
  }
}

// Where a run that keeps gradients stops to tell of those that are final.
ForwardStops stops_for(const GradientListener& listener, const Graph& graph,
                       const ExecutionPlan& plan) {
  if (!listener.finished) return {};
  const std::string suffix = state_target("", kAccumulatedGradient);
  ForwardStops stops;
  std::vector<std::vector<std::string>> parameters;
  for (const FinishedUpdates& stretch : finished_updates(graph, plan, listener.bytes)) {
    std::vector<std::string> names;
    for (size_t k : stretch.outputs) {
      const GraphOutput& output = graph.outputs()[k];
      if (output.role != OutputRole::state_update || !output.target.ends_with(suffix)) continue;
      names.push_back(output.target.substr(0, output.target.size() - suffix.size()));
    }
    if (names.empty()) continue;
    stops.ends.push_back(stretch.end);
    parameters.push_back(std::move(names));
  }
  stops.reached = [&listener, parameters = std::move(parameters)](size_t i) {
    listener.finished(parameters[i]);
  };
  return stops;
}

}  // namespace

TrainingProgram::TrainingProgram(Graph model, TrainingOptions options,
                                 const KernelRegistry& kernels, std::optional<Graph> evaluation)
    : model_(checked(std::move(model))),
      options_(std::move(options)),
      kernels_(&kernels),
      trained_(trained_parameters(model_, options_)) {
  if (evaluation) evaluation_ = checked(std::move(*evaluation));
}

TrainingProgram::TrainingProgram(Graph training, Graph optimizer, Graph evaluation,
                                 const KernelRegistry& kernels)
    : model_(checked(std::move(training))),
      evaluation_(checked(std::move(evaluation))),
      kernels_(&kernels),
      from_files_(true),
      optimizer_(checked(std::move(optimizer))) {
  for (const GraphInput& input : optimizer_.inputs()) {
    if (input.role == InputRole::parameter) trained_.push_back(input.target);
  }
}

void TrainingProgram::require_tensors(const TrainingState& state) const {
  require_tensors_of(model_, state);
  if (evaluation_) require_tensors_of(*evaluation_, state);
  if (from_files_) require_tensors_of(optimizer_, state);
}

std::shared_ptr<Session> TrainingProgram::session(size_t which) const {
  std::shared_ptr<Session>& made = sessions_[which];
  if (made == nullptr) {
    Graph graph;
    Session::Options session_options{.plan = {.updates_in_place = true}};
    const Processor processor = kernels_->device().is_host() ? Processor::cpu : Processor::gpu;
    const auto keep_within = [&](Graph unfused, std::function<void(Graph&)> finish) {
      if (!options_.budget.is_set()) return;
      session_options.make_plan =
          plan_within(std::move(unfused), options_.budget, std::move(finish));
    };
    if (which == kEvaluation) {
      graph = make_evaluation_graph(evaluation_model());
      keep_within(graph, {});
    } else if (from_files_) {
      graph = which == kOptimizerAlone ? optimizer_ : model_;
      run_pipeline(graph, "fuse", StagePart::whole, processor);
    } else {
      const auto kind = static_cast<StepKind>(which);
      TrainingOptions options = options_;
      options.step_classes = step_classes_;
      graph = which == kOptimizerAlone ? make_optimizer_graph(model_, options)
                                       : make_training_graph(model_, options, kind,
                                                             /*fused=*/true, processor);
      if (which != kOptimizerAlone) {
        keep_within(make_training_graph(model_, options, kind, /*fused=*/false),
                    updates_as_gradients_come(options_, kind) ? update_as_gradients_come
                                                              : std::function<void(Graph&)>());
      }
    }
    made = std::make_shared<Session>(std::move(graph), *kernels_, std::move(session_options));
  }
  return made;
}

// Parameters are told apart further where some of a class have had other numbers of updates than
// the others, and never put together again: a program is made anew no more often than it has
// parameters.
std::vector<int64_t> TrainingProgram::step_numbers(const TrainingState& state) const {
  std::vector<int64_t> numbers(num_step_classes_, state.steps + 1);
  if (state.updates_alike()) {
    if (!trained_.empty()) {
      std::ranges::fill(numbers, state.updates_of(trained_.front()) + 1);
    }
    return numbers;
  }
  const auto told_by = [&](const std::string& parameter) {
    const auto found = step_classes_.find(parameter);
    return std::pair(found == step_classes_.end() ? size_t{0} : found->second,
                     state.updates_of(parameter));
  };
  std::map<std::pair<size_t, int64_t>, size_t> classes;
  for (const std::string& parameter : trained_) {
    classes.emplace(told_by(parameter), classes.size());
  }
  const bool is_finer = classes.size() > num_step_classes_;
  if (is_finer) {
    if (from_files_) {
      throw UnsupportedError(
          "the parameters have had different numbers of updates, and the optimizer's graph takes "
          "the same for all");
    }
    std::map<std::string, size_t> made;
    for (const std::string& parameter : trained_) made[parameter] = classes.at(told_by(parameter));
    step_classes_ = std::move(made);
    num_step_classes_ = classes.size();
    for (const size_t which : {static_cast<size_t>(StepKind::whole),
                               static_cast<size_t>(StepKind::last), kOptimizerAlone}) {
      sessions_[which] = nullptr;
    }
    numbers.resize(num_step_classes_);
  }
  for (const auto& [key, number] : classes) numbers[is_finer ? number : key.first] = key.second + 1;
  return numbers;
}

TrainingOptions TrainingProgram::options_for(TrainingState& state) const {
  state.begin_update(trained_);
  step_numbers(state);
  TrainingOptions options = options_;
  options.step_classes = step_classes_;
  return options;
}

StepResult TrainingProgram::run(TrainingState& state, size_t which,
                                std::span<const InputTensor> inputs, size_t user_outputs,
                                const GradientListener& listener) const {
  const bool updates = which != kEvaluation && !keeps_gradients(which);
  if (updates) state.begin_update(trained_);
  std::vector<int64_t> steps = updates ? step_numbers(state) : std::vector{state.steps + 1};
  const std::shared_ptr<Session> session = this->session(which);
  const Graph& graph = session->graph();
  StepResult result;
  std::vector<Dims> dims;
  std::vector<const void*> addresses;
  StepNumbersOfRun numbers;
  numbers.learning_rate = state.learning_rate;
  numbers.loss_scale = state.loss_scale;
  // On a device they lie there during the run.
  Device& device = kernels_->device();
  const std::shared_ptr<void> scope = device.enter();
  std::shared_ptr<Block> placed;
  const TensorSpec norm_spec{DType::f64, {}};
  std::shared_ptr<Block> norm;  // in memory of its own: the caller keeps it
  char* base = reinterpret_cast<char*>(&numbers);
  char* steps_base = reinterpret_cast<char*>(steps.data());
  if (!device.is_host()) {
    placed = device.tensor(sizeof(numbers) + steps.size() * sizeof(int64_t), state.stream);
    base = static_cast<char*>(placed->data());
    steps_base = base + sizeof(numbers);
  }
  const auto number = [&](DType dtype, size_t offset) {
    return InputTensor{{dtype, {}}, base + offset};
  };
  const uint64_t runs = state.runs;
  bool draws = false;
  bool gives_norm = false;
  size_t next = 0;
  for (const GraphInput& input : graph.inputs()) {
    const Value& value = graph.value(input.value);
    InputTensor given;
    if (input.role == InputRole::user) {
      if (next == inputs.size()) {
        throw InvalidModelError(
            str("input '", value.name, "' is missing: there are ", inputs.size()));
      }
      given = inputs[next++];
      require_fit(value, given.spec, "input '" + value.name + "'");
    } else if (input.role == InputRole::seed) {
      draws = true;
      given = number(DType::i64, offsetof(StepNumbersOfRun, seed));
    } else if (input.target == kLearningRate) {
      given = number(DType::f64, offsetof(StepNumbersOfRun, learning_rate));
    } else if (input.target == kLossScale) {
      given = number(DType::f64, offsetof(StepNumbersOfRun, loss_scale));
    } else if (const auto step_class = step_class_of(input.target);
               input.role == InputRole::state && step_class) {
      if (*step_class >= steps.size()) {
        throw InvalidModelError(str("there is no value for '", input.target, "'"));
      }
      given = InputTensor{{DType::i64, {}}, steps_base + *step_class * sizeof(int64_t)};
    } else if (input.target == kGradientNorm) {
      gives_norm = true;
      given = number(DType::f64, offsetof(StepNumbersOfRun, gradient_norm));
      if (placed) {
        norm = device.results(std::array{&norm_spec}, state.stream)[0];
        given.data = norm->data();
      }
    } else if (input.target == kAllFinite) {
      given = number(DType::boolean, offsetof(StepNumbersOfRun, all_finite));
    } else if (is_kept(input.role)) {
      const MutableTensor& tensor = kept_tensor(state, input, value);
      given = {tensor.spec, tensor.data};
      require_fit(value, given.spec, "'" + input.target + "'");
    } else {
      throw InternalError(str("input '", value.name, "' has the role ", name_of(input.role)));
    }
    dims.push_back(given.spec.dims);
    addresses.push_back(given.data);
  }
  if (next != inputs.size()) {
    throw InvalidModelError(str("there are ", inputs.size(), " inputs, expected ", next));
  }
  refuse_shared_memory(graph, state, inputs);
  if (draws) numbers.seed = state.draw_seed();
  try {
    std::shared_ptr<const ExecutionPlan> plan = session->plan(dims);
    if (options_.memory_limit > 0 && plan->total_bytes() > options_.memory_limit) {
      throw OutOfMemoryError(str("the step needs ", plan->total_bytes(), " bytes, the limit is ",
                                 options_.memory_limit));
    }
    if (placed) {
      device.write(base, &numbers, sizeof(numbers), state.stream);
      constexpr size_t kAtOnce = Device::kMostWritten / sizeof(int64_t);
      for (size_t i = 0; i < steps.size(); i += kAtOnce) {
        device.write(steps_base + i * sizeof(int64_t), &steps[i],
                     std::min(kAtOnce, steps.size() - i) * sizeof(int64_t), state.stream);
      }
    }
    RunContext context(session, plan);
    // What is kept has the batch's gradients in it even where the forward throws its fault.
    if (placed && keeps_gradients(which)) context.count_faults(state.undone() + 1);
    result.outputs = context.forward(addresses, state.stream, stops_for(listener, graph, *plan));
    // Scaling the loss decides on the host what comes next; nothing else waits for the device.
    if (placed && options_.scales_loss) {
      device.download(&numbers, base, sizeof(numbers), state.stream);
      device.raise_faults();
    }
    if (placed && which != kEvaluation && !keeps_gradients(which)) {
      device.count_if_faulty(state.undone(), state.stream);
    }
    result.all_finite = numbers.all_finite;
    if (gives_norm && !placed) result.gradient_norm = numbers.gradient_norm;
    if (norm) result.gradient_norm_on_device = RunOutput{norm_spec, std::move(norm)};
    last_plan_ = std::move(plan);
  } catch (...) {
    state.runs = runs;
    state.settle();
    throw;
  }
  result.outputs.resize(user_outputs);
  return result;
}

void TrainingProgram::begin_gradients(TrainingState& state) const {
  state.settle();
  if (state.kept_batches == 0) {
    state.kept_parameters = trained_;
  } else if (!state.kept_parameters.empty() && state.kept_parameters != trained_) {
    throw UnsupportedError(
        "the batches of one optimizer step train different parameters; accumulate batches of one "
        "kind");
  }
}

StepResult TrainingProgram::train_step(TrainingState& state,
                                       std::span<const InputTensor> inputs) const {
  if (from_files_) throw InvalidModelError("graphs of files step in two calls");
  begin_gradients(state);
  const int64_t batches = options_.accumulation;
  const bool updates = state.kept_batches + 1 >= batches;
  StepKind kind = state.kept_batches == 0 ? StepKind::first : StepKind::next;
  if (updates) kind = state.kept_batches == 0 ? StepKind::whole : StepKind::last;
  StepResult result = run(state, static_cast<size_t>(kind), inputs, count_user_outputs(model_));
  state.kept_batches = updates ? 0 : state.kept_batches + 1;
  if (updates) {
    result.updated = !options_.scales_loss || result.all_finite;
    state.steps += result.updated;
  }
  return result;
}

StepResult TrainingProgram::add_gradients(TrainingState& state, std::span<const InputTensor> inputs,
                                          const GradientListener& listener) const {
  begin_gradients(state);
  StepKind kind = state.kept_batches == 0 ? StepKind::first : StepKind::next;
  if (from_files_ && kind == StepKind::first) {
    kind = StepKind::next;  // the file only adds
    for (auto& [target, tensor] : state.optimizer) {
      if (!target.ends_with(state_target("", kAccumulatedGradient))) continue;
      state.device->zero(tensor.data, tensor.spec.bytes(), state.stream);
    }
  }
  StepResult result =
      run(state, static_cast<size_t>(kind), inputs, count_user_outputs(model_), listener);
  ++state.kept_batches;
  return result;
}

StepResult TrainingProgram::optimizer_step(TrainingState& state) const {
  state.settle();
  if (state.kept_batches == 0) {
    throw InvalidModelError("an optimizer step needs the gradients of a batch");
  }
  StepResult result = run(state, kOptimizerAlone, {}, 0);
  result.updated = !options_.scales_loss || result.all_finite;
  state.steps += result.updated;
  return result;
}

std::vector<RunOutput> TrainingProgram::evaluate(TrainingState& state,
                                                 std::span<const InputTensor> inputs) const {
  return run(state, kEvaluation, inputs, count_user_outputs(evaluation_model())).outputs;
}

void TrainingProgram::make_states(TrainingState& state) const {
  const Graph& whole = graph(StepKind::whole);
  for (const GraphInput& input : whole.inputs()) {
    if (input.role != InputRole::state || input.target.starts_with("optimizer:")) continue;
    kept_tensor(state, input, whole.value(input.value));
  }
}

}  // namespace ortrain
