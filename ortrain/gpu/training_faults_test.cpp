// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/simulated_device.h"
#include "ortrain/ir/text.h"
#include "ortrain/training/checkpoint.h"
#include "ortrain/training/training_program.h"

// Labels that are wrong in a step of a program on a device.
namespace ortrain {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kModel =
    "graph g (float32[n, 2] x, int64[n] labels, float32[3, 2] w [parameter grad]) => (loss) {\n"
    "  t = Transpose <perm = [1, 0]> (w)\n"
    "  y = MatMul(x, t)\n"
    "  loss, sums = ortrain::CrossEntropy(y, labels) @ model.head\n}";

using Bytes = std::map<std::string, std::vector<float>>;

class Training {
 public:
  explicit Training(TrainingOptions options)
      : program(parse_graph(kModel), with_loss(std::move(options)), gpu::kernels(0)) {
    state.device = &gpu::device(0);
    state.learning_rate = 0.5;
    state.tensors["w"] = MutableTensor::copy_of(
        TensorData::from_values(DType::f32, {3, 2}, std::vector<float>{1, -1, 0.5, 2, 0, 1}),
        gpu::device(0));
  }
  static TrainingOptions with_loss(TrainingOptions options) {
    options.loss = "loss";
    return options;
  }
  StepResult step(int64_t label) {
    const std::vector<float> x{1, 2, -1, 0.5};
    const std::vector<int64_t> labels{1, label};
    const std::vector<InputTensor> inputs{{{DType::f32, {2, 2}}, x.data()},
                                          {{DType::i64, {2}}, labels.data()}};
    return program.train_step(state, inputs);
  }
  // Parameters and states, without gradients that are kept.
  Bytes values() const {
    Bytes result;
    for (const auto* tensors : {&state.tensors, &state.optimizer}) {
      for (const auto& [target, tensor] : *tensors) {
        if (target.ends_with(":grad")) continue;
        const auto* data = static_cast<const float*>(tensor.data);
        result[target].assign(data, data + tensor.spec.numel());
      }
    }
    return result;
  }

  TrainingProgram program;
  TrainingState state;
};

struct Optimizer {
  const char* step;
  double max_norm;
};

class TrainingFaults : public ::testing::TestWithParam<Optimizer> {
 protected:
  void TearDown() override { gpu::simulator::fall_behind(false); }
  static TrainingOptions options(int64_t accumulation = 1) {
    return {.optimizer = {.step = GetParam().step, .max_norm = GetParam().max_norm},
            .accumulation = accumulation};
  }
};

std::string error_of(Training& training, int64_t label) {
  try {
    training.step(label);
  } catch (const IndexError& error) {
    return error.what();
  }
  return "no error";
}

TEST_P(TrainingFaults, AWrongLabelChangesNothing) {
  Training training(options()), other(options());
  training.step(0);
  other.step(0);
  const Bytes before = training.values();
  EXPECT_THAT(error_of(training, 7), AllOf(HasSubstr("model.head"), HasSubstr("label 7")));
  EXPECT_EQ(training.values(), before);
  EXPECT_EQ(training.state.steps, 1);
  EXPECT_TRUE(training.step(2).updated);
  other.step(2);
  EXPECT_EQ(training.values(), other.values());
  EXPECT_EQ(training.state.steps, 2);
}

TEST_P(TrainingFaults, NorDoStepsThatFollowBeforeItIsFound) {
  Training training(options()), other(options());
  training.step(0);
  other.step(0);
  const Bytes before = training.values();
  gpu::simulator::fall_behind(true);
  training.step(-1);
  training.step(1);
  training.step(2);
  EXPECT_EQ(training.values(), before);
  gpu::simulator::fall_behind(false);
  EXPECT_THAT(error_of(training, 0), HasSubstr("label -1"));
  EXPECT_EQ(training.values(), before);
  EXPECT_EQ(training.state.steps, 1);
  // Found by a call that has nothing to do with the program.
  gpu::simulator::fall_behind(true);
  training.step(5);
  training.step(1);
  gpu::simulator::fall_behind(false);
  EXPECT_THROW(gpu::device(0).raise_faults(), IndexError);
  training.step(2);
  other.step(2);
  EXPECT_EQ(training.values(), other.values());
  EXPECT_EQ(training.state.steps, 2);
}

TEST_P(TrainingFaults, GradientsThatWereKeptWithItAreGivenUp) {
  Training training(options(2)), other(options(2));
  for (Training* each : {&training, &other}) {
    each->step(0);
    EXPECT_TRUE(each->step(1).updated);
  }
  const Bytes before = training.values();
  gpu::simulator::fall_behind(true);
  training.step(9);
  gpu::simulator::fall_behind(false);
  EXPECT_THAT(error_of(training, 0), HasSubstr("label 9"));
  EXPECT_EQ(training.state.kept_batches, 0);
  training.step(2);
  EXPECT_EQ(training.state.kept_batches, 1);
  // In the batch that updates, those before are of use still.
  EXPECT_THAT(error_of(training, 9), HasSubstr("label 9"));
  EXPECT_EQ(training.state.kept_batches, 1);
  EXPECT_EQ(training.values(), before);
  EXPECT_TRUE(training.step(1).updated);
  other.step(2);
  other.step(1);
  EXPECT_EQ(training.values(), other.values());
  EXPECT_EQ(training.state.steps, 2);
}

TEST_P(TrainingFaults, ThoseOfAnotherProgramLeaveKeptGradients) {
  Training training(options(3)), other(options(3)), wrong(options());
  for (Training* each : {&training, &other}) each->step(0);
  gpu::simulator::fall_behind(true);
  wrong.step(8);
  gpu::simulator::fall_behind(false);
  // Before the batch has begun.
  EXPECT_THAT(error_of(training, 1), HasSubstr("label 8"));
  EXPECT_EQ(training.state.kept_batches, 1);
  wrong.step(0);
  EXPECT_EQ(wrong.state.steps, 1);
  for (Training* each : {&training, &other}) {
    each->step(1);
    EXPECT_TRUE(each->step(2).updated);
  }
  EXPECT_EQ(training.values(), other.values());
  EXPECT_EQ(training.state.steps, 1);
}

TEST_P(TrainingFaults, AnErrorOfTheBatchGivesUpThoseBeforeIt) {
  Training training(options(3)), other(options(3));
  training.step(0);
  EXPECT_THAT(error_of(training, 9), HasSubstr("label 9"));
  EXPECT_EQ(training.state.kept_batches, 0);
  for (Training* each : {&training, &other}) {
    each->step(1);
    each->step(2);
    EXPECT_TRUE(each->step(0).updated);
  }
  EXPECT_EQ(training.values(), other.values());
}

TEST_P(TrainingFaults, ErrorsFromBeforeLeaveWhatIsRestored) {
  Training training(options()), other(options());
  for (Training* each : {&training, &other}) each->step(0);
  Checkpoint checkpoint;
  checkpoint.has_optimizer = true;
  checkpoint.learning_rate = training.state.learning_rate;
  checkpoint.steps = training.state.steps;
  for (const auto& [name, tensor] : training.state.tensors) {
    checkpoint.tensors[name] = tensor.on_host().clone(host_device());
  }
  for (const auto& [name, tensor] : training.state.optimizer) {
    checkpoint.optimizer[name] = tensor.on_host().clone(host_device());
  }
  gpu::simulator::fall_behind(true);
  training.step(4);
  training.step(1);
  restore(training.state, checkpoint);
  EXPECT_EQ(training.state.steps, 1);
  gpu::simulator::fall_behind(false);
  EXPECT_THAT(error_of(training, 1), HasSubstr("label 4"));
  EXPECT_EQ(training.state.steps, 1);
  for (Training* each : {&training, &other}) each->step(2);
  EXPECT_EQ(training.values(), other.values());
  EXPECT_EQ(training.state.steps, 2);
}

INSTANTIATE_TEST_SUITE_P(All, TrainingFaults,
                         ::testing::Values(Optimizer{"SgdStep", 0}, Optimizer{"AdamStep", 0},
                                           Optimizer{"AdamStep", 0.1}, Optimizer{"LambStep", 0},
                                           Optimizer{"AdagradStep", 0}),
                         [](const auto& info) {
                           return std::string(info.param.step) +
                                  (info.param.max_norm > 0 ? "Clipped" : "");
                         });

}  // namespace
}  // namespace ortrain
