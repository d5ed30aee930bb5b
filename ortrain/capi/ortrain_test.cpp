// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/capi/ortrain.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>

#include "ortrain/ir/onnx_io.h"
#include "ortrain/ir/text.h"

namespace ortrain::capi {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CInterface : public ::testing::Test {
 protected:
  void SetUp() override {
    folder = fs::temp_directory_path() / ("ortrain_capi_" + std::to_string(::getpid()));
    fs::remove_all(folder);
    fs::create_directory(folder);
    // y = x w + b, with a scalar that is none of the weights
    const Graph graph = parse_graph(
        "graph g (float32[n, 2] x) => (y) {\n"
        "  const w = float32[2, 3] {1, 2, 3, 4, 5, 6}\n  const b = float32[3] {0, 0, 0}\n"
        "  const scale = float32 1\n"
        "  p = MatMul(x, w)\n  s = Mul(p, scale)\n  y = Add(s, b)\n}");
    model = (folder / "model.onnx").string();
    save_onnx(graph, model);
    options.loss = "cross_entropy";
    options.optimizer = "sgd";
    options.learning_rate = 0.5;
  }
  void TearDown() override { fs::remove_all(folder); }

  static double loss_of(const Outputs& outputs) { return *outputs.data<float>(0); }
  Outputs step(Trainer& trainer) {
    return trainer.train_step({Tensor(x.data(), {2, 2}), Tensor(labels.data(), {2})});
  }

  fs::path folder;
  std::string model;
  Options options;
  std::vector<float> x{1, 0, 0, 1};
  std::vector<int64_t> labels{0, 1};
};

TEST_F(CInterface, TrainsAModel) {
  Trainer trainer = Trainer::from_onnx(model, options);
  EXPECT_THAT(trainer.input_names(), ElementsAre("x", "target"));
  EXPECT_THAT(trainer.output_names(), ElementsAre("loss", "y"));
  EXPECT_THAT(trainer.output_names(true), ElementsAre("loss", "y"));
  // b, then w, by their names
  EXPECT_THAT(trainer.parameters(), ElementsAre(0, 0, 0, 1, 2, 3, 4, 5, 6));
  double last = 1e9;
  for (int i = 0; i < 5; ++i) {
    trainer.lazy_reset_grad();
    const Outputs outputs = step(trainer);
    EXPECT_EQ(outputs.size(), 2U);
    EXPECT_THAT(outputs.dims(1), ElementsAre(2, 3));
    EXPECT_LT(loss_of(outputs), last);
    last = loss_of(outputs);
    trainer.optimizer_step();
  }
  const Outputs evaluated =
      trainer.eval_step({Tensor(x.data(), {2, 2}), Tensor(labels.data(), {2})});
  EXPECT_LT(loss_of(evaluated), last);
}

TEST_F(CInterface, AddsGradientsUntilTheyAreReset) {
  Trainer once = Trainer::from_onnx(model, options), twice = Trainer::from_onnx(model, options);
  twice.set_learning_rate(0.25);
  step(once);
  once.optimizer_step();
  step(twice);
  step(twice);
  twice.optimizer_step();
  const std::vector<float> a = once.parameters(), b = twice.parameters();
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-6);
}

TEST_F(CInterface, TrainsFromArtifactsAsFromTheModel) {
  const std::string artifacts = (folder / "artifacts").string();
  options.optimizer = "adamw";
  options.weight_decay = 0.1;
  options.max_norm = 0.5;
  check(ortrain_write_artifacts(model.c_str(), &options, artifacts.c_str()));
  Trainer a = Trainer::from_onnx(model, options), b = Trainer::from_artifacts(artifacts);
  EXPECT_EQ(a.input_names(), b.input_names());
  EXPECT_EQ(a.output_names(), b.output_names());
  EXPECT_EQ(b.learning_rate(), 0.5);
  for (int i = 0; i < 4; ++i) {
    for (Trainer* trainer : {&a, &b}) {
      trainer->lazy_reset_grad();
      step(*trainer);
      trainer->optimizer_step();
    }
    EXPECT_EQ(a.parameters(), b.parameters());
  }
}

TEST_F(CInterface, SchedulesTheRate) {
  Trainer trainer = Trainer::from_onnx(model, options);
  EXPECT_THROW(trainer.scheduler_step(), Error);
  trainer.register_linear_lr_scheduler(2, 6, 1.0);
  std::vector<double> rates{trainer.learning_rate()};
  for (int i = 0; i < 7; ++i) {
    step(trainer);
    trainer.optimizer_step();
    trainer.scheduler_step();
    rates.push_back(trainer.learning_rate());
  }
  EXPECT_THAT(rates, ElementsAre(0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0));
  trainer.register_linear_lr_scheduler(0, 6, 0.0);
  EXPECT_EQ(trainer.learning_rate(), 0.0);
  EXPECT_THROW(trainer.register_linear_lr_scheduler(0, 6, -1.0), Error);
}

TEST_F(CInterface, KeepsCheckpoints) {
  options.optimizer = "lamb";
  Trainer trainer = Trainer::from_onnx(model, options);
  const std::string checkpoints = (folder / "checkpoints").string();
  const auto train = [&](Trainer& t) {
    t.lazy_reset_grad();
    step(t);
    t.optimizer_step();
  };
  train(trainer);
  trainer.save_checkpoint(checkpoints);
  train(trainer);
  Trainer other = Trainer::from_onnx(model, options);
  other.load_checkpoint(checkpoints);
  train(other);
  EXPECT_EQ(trainer.parameters(), other.parameters());
  EXPECT_THROW(other.load_checkpoint((folder / "none").string()), Error);
}

TEST_F(CInterface, ExportsForInference) {
  Trainer trainer = Trainer::from_onnx(model, options);
  std::vector<float> row(trainer.parameters().size());
  for (size_t i = 0; i < row.size(); ++i) row[i] = static_cast<float>(i);
  trainer.set_parameters(row);
  EXPECT_EQ(trainer.parameters(), row);
  const std::string path = (folder / "trained.onnx").string();
  trainer.export_for_inference(path, {"y"});
  LoadOptions load;
  load.initializers = LoadOptions::Initializers::weights;
  const OnnxModel exported = load_onnx_model(path, load);
  ASSERT_EQ(exported.graph.outputs().size(), 1U);
  EXPECT_EQ(exported.values.at("b").data_as<float>()[2], 2.0f);
  int users = 0;
  for (const GraphInput& input : exported.graph.inputs()) users += input.role == InputRole::user;
  EXPECT_EQ(users, 1) << "the labels are not needed";
}

TEST_F(CInterface, HasTheLosses) {
  const std::vector<float> target{1, 0, 1, 0, 1, 0};
  // y = (1, 2, 3), (4, 5, 6)
  const std::vector<std::pair<const char*, double>> expected{
      {"mse", (0 + 4 + 4 + 16 + 16 + 36) / 6.0},
      {"l1", (0 + 2 + 2 + 4 + 4 + 6) / 6.0},
      {"bce_with_logits", [] {
         double sum = 0;
         for (int y = 1; y <= 6; ++y) sum += std::log1p(std::exp(-y)) + (y % 2 == 0 ? y : 0);
         return sum / 6;
       }()}};
  for (const auto& [loss, value] : expected) {
    options.loss = loss;
    Trainer trainer = Trainer::from_onnx(model, options);
    const Outputs outputs =
        trainer.train_step({Tensor(x.data(), {2, 2}), Tensor(target.data(), {2, 3})});
    EXPECT_NEAR(loss_of(outputs), value, 1e-5) << loss;
  }
}

TEST_F(CInterface, HandsLogLinesToTheProgram) {
  ::setenv("ORTRAIN_LOG", "plan", 1);
  std::vector<std::string> lines;
  ortrain_set_log_callback(
      [](const char* category, const char* line, void* context) {
        static_cast<std::vector<std::string>*>(context)->push_back(std::string(category) + line);
      },
      &lines);
  Trainer trainer = Trainer::from_onnx(model, options);
  step(trainer);
  ortrain_set_log_callback(nullptr, nullptr);
  trainer.optimizer_step();
  ::unsetenv("ORTRAIN_LOG");
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_THAT(lines[0], HasSubstr("steps"));
}

TEST_F(CInterface, RepeatsRunsFromASeed) {
  const Graph graph = parse_graph(
      "graph g (float32[n, 2] x) => (y) {\n"
      "  const w = float32[2, 64] {1, ...}\n  p = MatMul(x, w)\n"
      "  y, _ = Dropout(p, float32 0.5, bool true)\n}");
  save_onnx(graph, model);
  const auto losses = [&](uint64_t seed) {
    Trainer trainer = Trainer::from_onnx(model, options);
    trainer.set_seed(seed);
    const double first = loss_of(step(trainer));
    return std::pair(first, loss_of(step(trainer)));
  };
  const auto [first, second] = losses(1);
  EXPECT_EQ(losses(1), std::pair(first, second));
  EXPECT_NE(first, second);
  EXPECT_NE(losses(2).first, first);
}

TEST_F(CInterface, RefusesNumbersThatTrainNothing) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::pair<const char*, double ortrain_options::*> numbers[] = {
      {"learning_rate", &ortrain_options::learning_rate},
      {"weight_decay", &ortrain_options::weight_decay},
      {"beta1", &ortrain_options::beta1},
      {"beta2", &ortrain_options::beta2},
      {"epsilon", &ortrain_options::epsilon},
      {"momentum", &ortrain_options::momentum},
      {"max_norm", &ortrain_options::max_norm}};
  ortrain_trainer* trainer = nullptr;
  for (const auto& [name, number] : numbers) {
    for (const double value : {kNan, kInfinity, -1.0}) {
      if (value == -1.0 && number == &ortrain_options::epsilon) continue;  // the optimizer's own
      Options wrong = options;
      wrong.*number = value;
      EXPECT_EQ(ortrain_create_from_onnx(model.c_str(), &wrong, &trainer),
                ORTRAIN_INVALID_ARGUMENT);
      EXPECT_THAT(ortrain_last_error(), HasSubstr(std::string("'") + name + "' is "));
    }
  }
  Options wrong = options;
  wrong.accumulation = 0;
  EXPECT_EQ(ortrain_create_from_onnx(model.c_str(), &wrong, &trainer), ORTRAIN_INVALID_ARGUMENT);
  EXPECT_EQ(trainer, nullptr);
  Trainer made = Trainer::from_onnx(model, options);
  for (const double rate : {kNan, kInfinity, -1.0}) {
    EXPECT_THROW(made.set_learning_rate(rate), Error);
    EXPECT_THROW(made.register_linear_lr_scheduler(1, 2, rate), Error);
  }
  const ortrain_tensor wild{ORTRAIN_FLOAT32, SIZE_MAX, nullptr, x.data()};
  ASSERT_EQ(ortrain_create_from_onnx(model.c_str(), &options, &trainer), ORTRAIN_OK);
  EXPECT_EQ(ortrain_train_step(trainer, &wild, 1, nullptr), ORTRAIN_INVALID_SHAPE);
  ortrain_destroy(trainer);
}

TEST_F(CInterface, RefusesWithAStatusAndAMessage) {
  ortrain_trainer* trainer = nullptr;
  EXPECT_EQ(ortrain_create_from_onnx(nullptr, &options, &trainer), ORTRAIN_INVALID_ARGUMENT);
  EXPECT_THAT(ortrain_last_error(), HasSubstr("'path' is null"));
  EXPECT_EQ(ortrain_create_from_onnx("/none.onnx", &options, &trainer), ORTRAIN_FILE);
  EXPECT_EQ(ortrain_create_from_artifacts("/none", &trainer), ORTRAIN_FILE);
  const auto create = [&] { return ortrain_create_from_onnx(model.c_str(), &options, &trainer); };
  options.loss = "other";
  EXPECT_EQ(create(), ORTRAIN_INVALID_MODEL);
  EXPECT_THAT(ortrain_last_error(), HasSubstr("cross_entropy, mse, l1, bce_with_logits"));
  options.loss = "mse";
  options.optimizer = "other";
  EXPECT_EQ(create(), ORTRAIN_INVALID_MODEL);
  EXPECT_THAT(ortrain_last_error(), HasSubstr("adamw, adam, sgd, lamb, adagrad"));
  options.optimizer = "sgd";
  options.loss_output = "z";
  EXPECT_EQ(create(), ORTRAIN_INVALID_MODEL);
  options.loss_output = nullptr;
  const char* const names[] = {"nothing"};
  options.trained = names;
  options.num_trained = 1;
  EXPECT_EQ(create(), ORTRAIN_INVALID_MODEL);
  options.trained = nullptr;
  options.loss = nullptr;
  EXPECT_EQ(create(), ORTRAIN_INVALID_MODEL);
  EXPECT_EQ(trainer, nullptr);

  options.loss = "cross_entropy";
  Trainer made = Trainer::from_onnx(model, options);
  const auto status_of = [&](const auto& fn) {
    try {
      fn();
      return ORTRAIN_OK;
    } catch (const Error& error) {
      return error.status();
    }
  };
  const Tensor good(x.data(), {2, 2}), label(labels.data(), {2});
  EXPECT_EQ(status_of([&] { made.train_step({good}); }), ORTRAIN_INVALID_MODEL);
  EXPECT_EQ(status_of([&] { made.train_step({Tensor(x.data(), {1, 4}), label}); }),
            ORTRAIN_INVALID_SHAPE);
  EXPECT_EQ(status_of([&] { made.train_step({Tensor(x.data(), {-1, 2}), label}); }),
            ORTRAIN_INVALID_SHAPE);
  EXPECT_EQ(status_of([&] { made.train_step({label, good}); }), ORTRAIN_INVALID_TYPE);
  const std::vector<int64_t> wild{0, 3};
  EXPECT_EQ(status_of([&] { made.train_step({good, Tensor(wild.data(), {2})}); }), ORTRAIN_INDEX);
  EXPECT_EQ(status_of([&] { made.optimizer_step(); }), ORTRAIN_INVALID_MODEL);
  EXPECT_EQ(status_of([&] { made.set_learning_rate(-1); }), ORTRAIN_INVALID_ARGUMENT);
  EXPECT_EQ(status_of([&] { made.set_parameters({1, 2}); }), ORTRAIN_INVALID_ARGUMENT);
  EXPECT_EQ(status_of([&] { made.export_for_inference("m.onnx", {"z"}); }), ORTRAIN_INVALID_MODEL);
  const Outputs outputs = made.train_step({good, label});
  EXPECT_EQ(status_of([&] { outputs.data<float>(2); }), ORTRAIN_INVALID_ARGUMENT);
  EXPECT_EQ(status_of([&] { outputs.data<int64_t>(0); }), ORTRAIN_INVALID_TYPE);
  EXPECT_EQ(status_of([&] { ortrain_destroy(nullptr); }), ORTRAIN_OK);
}

}  // namespace
}  // namespace ortrain::capi
