// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ortrain/runtime/session.h"
#include "ortrain/training/training_graph.h"
#include "ortrain/training/training_state.h"

namespace ortrain {

// A tensor that the caller holds while a run reads it.
struct InputTensor {
  TensorSpec spec;
  const void* data = nullptr;
};

struct StepResult {
  std::vector<RunOutput> outputs;  // the model's, in its order
  bool updated = false;            // the optimizer ran, and was not left out
  bool all_finite = true;
  std::optional<double> gradient_norm;  // before clipping, where the optimizer ran and needs it
  // The same on a device, so that nobody waits for it: a float64 scalar.
  std::optional<RunOutput> gradient_norm_on_device;
};

// Is told of gradients as they become final, while the rest of the backward is still to come.
struct GradientListener {
  // Of gradients in a stretch of the backward, at least; the last stretch has what is left.
  size_t bytes = 0;
  // `parameters`: targets of those whose kept gradients are final. What it throws ends the run.
  std::function<void(const std::vector<std::string>& parameters)> finished = {};
};

// One model made ready to train: graphs and plans for each kind of step, made when first needed.
class TrainingProgram {
 public:
  // `model` as for make_training_graph. `evaluation`: what evaluate() runs, with the same targets;
  // by default the same model. Throws what making the training graph throws.
  TrainingProgram(Graph model, TrainingOptions options, const KernelRegistry& kernels,
                  std::optional<Graph> evaluation = std::nullopt);

  // Graphs that are made already, as `ortrain/training/artifacts.h` describes them: for
  // add_gradients, optimizer_step and evaluate.
  TrainingProgram(Graph training, Graph optimizer, Graph evaluation, const KernelRegistry& kernels);

  const Graph& model() const { return model_; }
  const Graph& evaluation_model() const { return evaluation_ ? *evaluation_ : model_; }
  const TrainingOptions& options() const { return options_; }
  // The same for the next step of a state: parameters that have had different numbers of updates
  // are told apart.
  TrainingOptions options_for(TrainingState& state) const;
  // Targets of the parameters that change.
  const std::vector<std::string>& trained() const { return trained_; }
  Device& device() const { return kernels_->device(); }

  // Throws InvalidModelError, DTypeError or ShapeError for a parameter or buffer that `state` has
  // no fitting tensor for.
  void require_tensors(const TrainingState& state) const;

  // Runs a batch. Its gradients are kept until `accumulation` batches are there; the last one runs
  // the optimizer with them in the same graph. `inputs`: one per model input of role user, in
  // order. Throws ShapeError and DTypeError naming an input that does not fit, OutOfMemoryError for
  // a plan beyond memory_limit or a budget that cannot be reached, and what kernels throw; counters
  // do not move then. A wrong label or index on a device may be thrown by a later call: from its
  // step on none has changed a parameter or state or counts, and where it was among several batches
  // of a step, the gradients that were kept are given up. Buffers may have moved.
  StepResult train_step(TrainingState& state, std::span<const InputTensor> inputs) const;

  // The same in two calls: `add_gradients` keeps the gradients of any number of batches, added to
  // those that are kept, and optimizer_step uses them. Gradients are divided by `accumulation`.
  // `listener`: each trained parameter is told of once; nothing is called without `finished`.
  StepResult add_gradients(TrainingState& state, std::span<const InputTensor> inputs,
                           const GradientListener& listener = {}) const;
  StepResult optimizer_step(TrainingState& state) const;
  // Forgets the gradients that are kept; the next batch starts anew.
  static void reset_gradients(TrainingState& state) { state.kept_batches = 0; }

  // Runs the forward alone. `inputs`: one per user input of evaluation_model().
  std::vector<RunOutput> evaluate(TrainingState& state, std::span<const InputTensor> inputs) const;

  // The graph that runs for a kind of step, as it was optimized.
  const Graph& graph(StepKind kind) const { return session(kind)->graph(); }
  // The plan of the last run; null before the first.
  std::shared_ptr<const ExecutionPlan> last_plan() const { return last_plan_; }
  // Makes the optimizer's states, so that they can be loaded before the first step.
  void make_states(TrainingState& state) const;

 private:
  static constexpr size_t kOptimizerAlone = 4, kEvaluation = 5, kSessions = 6;

  std::shared_ptr<Session> session(StepKind kind) const {
    return session(static_cast<size_t>(kind));
  }
  std::shared_ptr<Session> session(size_t which) const;
  void begin_gradients(TrainingState& state) const;
  // The step number of each class of parameters, of which one is made per number that there is.
  std::vector<int64_t> step_numbers(const TrainingState& state) const;
  StepResult run(TrainingState& state, size_t which, std::span<const InputTensor> inputs,
                 size_t user_outputs, const GradientListener& listener = {}) const;

  Graph model_;
  std::optional<Graph> evaluation_;
  TrainingOptions options_;
  const KernelRegistry* kernels_;
  std::vector<std::string> trained_;
  mutable std::array<std::shared_ptr<Session>, kSessions> sessions_;
  mutable std::map<std::string, size_t> step_classes_;  // of trained_, where there are several
  mutable size_t num_step_classes_ = 1;
  mutable std::shared_ptr<const ExecutionPlan> last_plan_;
  bool from_files_ = false;
  Graph optimizer_;  // of the second constructor
};

}  // namespace ortrain
