// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/training_program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <stdexcept>

#include "ortrain/base/error.h"
#include "ortrain/ir/text.h"
#include "ortrain/runtime/external_functions.h"
#include "ortrain/training/prepare_model.h"

namespace ortrain {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// loss = sum over the batch of w . x: the gradient of w is the sum of the rows.
const char* const kModel =
    "graph g (float32[b, 2] x, float32[2] w [parameter grad], float32[2] frozen [parameter]) =>\n"
    "    (loss, y) {\n"
    "  m = Mul(w, frozen)\n  y = Mul(x, m)\n  loss = ReduceSum<keepdims = 0>(y)\n}";

class Training {
 public:
  explicit Training(TrainingOptions options, const std::string& text = kModel)
      : program(parse_graph(text), with_loss(std::move(options)), cpu_kernels()) {
    state.learning_rate = 0.5;
    set("w", {1, 2});
    set("frozen", {1, 1});
  }

  static TrainingOptions with_loss(TrainingOptions options) {
    if (options.loss.empty()) options.loss = "loss";
    return options;
  }
  void set(const std::string& target, const std::vector<float>& values) {
    state.tensors[target] = MutableTensor::copy_of(
        TensorData::from_values(DType::f32, {static_cast<int64_t>(values.size())}, values));
  }
  std::vector<float> get(const std::string& target) const {
    const auto& tensors = target.find(':') == std::string::npos ? state.tensors : state.optimizer;
    const MutableTensor& tensor = tensors.at(target);
    const auto* data = static_cast<const float*>(tensor.data);
    return {data, data + tensor.spec.numel()};
  }
  StepResult step(const std::vector<float>& rows) {
    const InputTensor input{{DType::f32, {static_cast<int64_t>(rows.size() / 2), 2}}, rows.data()};
    return program.train_step(state, std::span(&input, 1));
  }

  TrainingProgram program;
  TrainingState state;
};

TrainingOptions sgd(int64_t accumulation = 1, double max_norm = 0) {
  return {.optimizer = {.step = "SgdStep", .max_norm = max_norm}, .accumulation = accumulation};
}

TEST(TrainingProgram, StepsAndReturnsOutputsOfBefore) {
  Training training(sgd());
  const StepResult result = training.step({1, 2, 3, 4});
  ASSERT_EQ(result.outputs.size(), 2U);
  EXPECT_EQ(*static_cast<const float*>(result.outputs[0].block->data()), 16);
  EXPECT_TRUE(result.updated);
  EXPECT_FALSE(result.gradient_norm.has_value());
  EXPECT_THAT(training.get("w"), ElementsAre(1 - 2, 2 - 3));
  EXPECT_THAT(training.get("frozen"), ElementsAre(1, 1));
  EXPECT_THAT(training.program.trained(), ElementsAre("w"));
  EXPECT_EQ(training.state.steps, 1);
  // Another batch size: another plan, the same state.
  training.step({1, 1});
  EXPECT_THAT(training.get("w"), ElementsAre(-1.5, -1.5));
}

TEST(TrainingProgram, AveragesTheGradientsOfSeveralBatches) {
  Training training(sgd(3));
  EXPECT_FALSE(training.step({3, 6}).updated);
  EXPECT_THAT(training.get("w:grad"), ElementsAre(1, 2));
  EXPECT_FALSE(training.step({3, 6}).updated);
  EXPECT_THAT(training.get("w:grad"), ElementsAre(2, 4));
  EXPECT_EQ(training.state.kept_batches, 2);
  EXPECT_TRUE(training.step({6, 12}).updated);
  EXPECT_THAT(training.get("w"), ElementsAre(1 - 2, 2 - 4));
  EXPECT_EQ(training.state.steps, 1);
  EXPECT_EQ(training.state.kept_batches, 0);
  training.step({3, 3});
  EXPECT_THAT(training.get("w:grad"), ElementsAre(1, 1)) << "the sum starts anew";
}

TEST(TrainingProgram, StepsInTwoCallsAsInOne) {
  Training one(sgd(1, 0.5)), two(sgd(1, 0.5));
  one.step({3, 4});
  const std::vector<float> rows{3, 4};
  const InputTensor input{{DType::f32, {1, 2}}, rows.data()};
  EXPECT_THROW(two.program.optimizer_step(two.state), InvalidModelError);
  two.program.add_gradients(two.state, std::span(&input, 1));
  const StepResult result = two.program.optimizer_step(two.state);
  EXPECT_EQ(*result.gradient_norm, 5);
  EXPECT_EQ(one.get("w"), two.get("w"));
  EXPECT_EQ(two.state.kept_batches, 1) << "kept until they are given up";
  TrainingProgram::reset_gradients(two.state);
  EXPECT_THROW(two.program.optimizer_step(two.state), InvalidModelError);
}

// The last layer's gradient is final first; that of the first, which is used twice, last.
constexpr char kLayers[] = R"(
graph g (float32[b, 4] x, float32[4, 4] a [parameter grad], float32[4, 4] b [parameter grad],
         float32[4, 4] c [parameter grad]) => (loss) {
  p = MatMul(x, a)
  q = MatMul(p, b)
  t = Tanh(q)
  r = MatMul(t, c)
  s = MatMul(r, a)
  loss = ReduceSum<keepdims = 0>(s)
}
)";

struct Layers {
  Layers() : program(parse_graph(kLayers), Training::with_loss(sgd(2)), cpu_kernels()) {
    for (const char* name : {"a", "b", "c"}) {
      std::vector<float> values(16);
      for (size_t i = 0; i < 16; ++i) values[i] = static_cast<float>((i * 7 + *name) % 5) * 0.1F;
      state.tensors[name] =
          MutableTensor::copy_of(TensorData::from_values(DType::f32, {4, 4}, values));
    }
  }
  std::vector<float> gradient(const std::string& name) const {
    const auto* data = static_cast<const float*>(state.optimizer.at(name + ":grad").data);
    return {data, data + 16};
  }
  void add(const GradientListener& listener = {}) {
    const std::vector<float> rows{1, -2, 3, 4, 0.5, 1, -1, 2};
    const InputTensor input{{DType::f32, {2, 4}}, rows.data()};
    program.add_gradients(state, std::span(&input, 1), listener);
  }

  TrainingProgram program;
  TrainingState state;
};

TEST(TrainingProgram, TellsOfGradientsWhenTheyAreFinal) {
  Layers silent, told;
  for (int batch = 0; batch < 2; ++batch) {  // the first keeps gradients, the second adds to them
    silent.add();
    std::vector<std::vector<std::string>> order;
    std::map<std::string, std::vector<float>> seen;
    told.add({1, [&](const std::vector<std::string>& parameters) {
                order.push_back(parameters);
                for (const std::string& name : parameters) seen[name] = told.gradient(name);
              }});
    EXPECT_THAT(order, ElementsAre(ElementsAre("c"), ElementsAre("b"), ElementsAre("a")));
    for (const auto& [name, values] : seen) {
      EXPECT_EQ(values, told.gradient(name)) << name << " has changed since";
      EXPECT_EQ(values, silent.gradient(name)) << name;
    }
  }
  // A bias, whose sum is a node of its own, is told of with its layer.
  Graph graph = parse_graph(R"(
graph g (float32[b, 4] x, float32[4, 4] a [parameter grad], float32[4] c [parameter grad],
         float32[4, 4] d [parameter grad], float32[4] e [parameter grad]) => (loss) {
  p = MatMul(x, a)
  q = Add(p, c)
  t = Tanh(q)
  r = MatMul(t, d)
  s = Add(r, e)
  u = Mul(s, s)
  loss = ReduceSum<keepdims = 0>(u)
}
)");
  const TrainingProgram program(std::move(graph), Training::with_loss(sgd(2)), cpu_kernels());
  TrainingState state;
  for (const char* name : {"a", "c", "d", "e"}) {
    const Dims dims = *name == 'a' || *name == 'd' ? Dims{4, 4} : Dims{4};
    state.tensors[name] = MutableTensor::zeros({DType::f32, dims});
  }
  const std::vector<float> row{1, 2, 3, 4};
  const InputTensor input{{DType::f32, {1, 4}}, row.data()};
  for (int batch = 0; batch < 2; ++batch) {
    std::string told_of;
    program.add_gradients(state, std::span(&input, 1), {1, [&](const auto& parameters) {
                                                          for (const std::string& name : parameters)
                                                            told_of += name;
                                                        }});
    EXPECT_LT(std::max(told_of.find('d'), told_of.find('e')),
              std::min(told_of.find('a'), told_of.find('c')))
        << told_of;
  }
  // Small ones are told of together.
  std::vector<std::vector<std::string>> order;
  Layers few;
  few.add({65, [&](const auto& parameters) { order.push_back(parameters); }});
  EXPECT_THAT(order, ElementsAre(ElementsAre("c", "b"), ElementsAre("a")));
}

// Kept gradients that others are made of: of the operands of a difference, for example.
TEST(TrainingProgram, KeptGradientsFeedEachOther) {
  const char* const text = R"(
graph g (float32[b, 4] x, float32[4] p [parameter grad], float32[4] q [parameter grad],
         float32[4] r [parameter grad]) => (loss) {
  d = Sub(p, q)
  e = Sub(d, r)
  n = Neg(e)
  s = Sigmoid(n)
  y = Mul(x, s)
  loss = ReduceSum<keepdims = 0>(y)
}
)";
  std::map<std::string, std::vector<float>> by_batches[2];
  for (const int64_t batches : {1, 2}) {
    const TrainingProgram program(parse_graph(text), Training::with_loss(sgd(batches)),
                                  cpu_kernels());
    TrainingState state;
    state.learning_rate = 0.5;
    for (const char* name : {"p", "q", "r"}) {
      state.tensors[name] = MutableTensor::copy_of(
          TensorData::from_values<float>(DType::f32, {4}, {0.5F, -1, 2, 0.25F}));
    }
    const std::vector<float> row{1, 2, 3, 4};
    const InputTensor input{{DType::f32, {1, 4}}, row.data()};
    for (int64_t i = 0; i < batches; ++i) program.train_step(state, std::span(&input, 1));
    for (const auto& [name, tensor] : state.tensors) {
      const auto* data = static_cast<const float*>(tensor.data);
      by_batches[batches - 1][name] = {data, data + 4};
    }
  }
  EXPECT_EQ(by_batches[0], by_batches[1]);
  EXPECT_NE(by_batches[0]["p"], by_batches[0]["q"]);
}

TEST(TrainingProgram, AListenerThatThrowsEndsTheRun) {
  Layers layers;
  EXPECT_THROW(
      layers.add({1, [](const std::vector<std::string>&) { throw std::runtime_error("enough"); }}),
      std::runtime_error);
  EXPECT_EQ(layers.state.kept_batches, 0);
  EXPECT_EQ(layers.state.runs, 0U);
  layers.add();
  EXPECT_EQ(layers.state.kept_batches, 1);
}

TEST(TrainingProgram, ClipsByTheNormOfAll) {
  Training training(sgd(1, 1.0));
  const StepResult result = training.step({3, 4});
  EXPECT_EQ(*result.gradient_norm, 5);
  EXPECT_NEAR(training.get("w")[0], 1 - 0.5 * 0.6, 1e-6);
  EXPECT_NEAR(training.get("w")[1], 2 - 0.5 * 0.8, 1e-6);
}

TEST(TrainingProgram, LeavesOutStepsThatAreNotFinite) {
  TrainingOptions options = sgd();
  options.scales_loss = true;
  Training training(options);
  training.state.loss_scale = 1024;
  EXPECT_TRUE(training.step({1, 2}).updated);
  EXPECT_THAT(training.get("w"), ElementsAre(0.5, 1)) << "the scale is taken out again";
  const StepResult result = training.step({INFINITY, 2});
  EXPECT_FALSE(result.updated);
  EXPECT_FALSE(result.all_finite);
  EXPECT_THAT(training.get("w"), ElementsAre(0.5, 1));
  EXPECT_EQ(training.state.steps, 1);
}

TEST(TrainingProgram, TreatsGroupsDifferently) {
  TrainingOptions options = sgd();
  options.optimizer.groups = {
      {.parameters = {"frozen"}, .attributes = {{"weight_decay", 1.0}}, .rate_factor = 2.0}};
  std::string text = kModel;
  text.replace(text.find("frozen [parameter]"), 18, "frozen [parameter grad]");
  Training training(options, text);
  training.step({1, 1});
  EXPECT_THAT(training.get("w"), ElementsAre(0.5, 1.5));
  // gradient w x = (1, 2), plus the decay (1, 1), at the rate 1
  EXPECT_THAT(training.get("frozen"), ElementsAre(-1, -2));
}

TEST(TrainingProgram, EvaluatesWithoutChange) {
  Training training(sgd());
  const std::vector<float> rows{1, 2};
  const InputTensor input{{DType::f32, {1, 2}}, rows.data()};
  const auto outputs = training.program.evaluate(training.state, std::span(&input, 1));
  EXPECT_EQ(*static_cast<const float*>(outputs[0].block->data()), 5);
  EXPECT_THAT(training.get("w"), ElementsAre(1, 2));
  EXPECT_EQ(training.state.steps, 0);
}

template <class Fn>
std::string error_of(Fn fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(TrainingProgram, RefusesWhatDoesNotFit) {
  Training training(sgd());
  EXPECT_THAT(error_of([&] { training.program.train_step(training.state, {}); }),
              HasSubstr("input 'x' is missing"));
  const std::vector<float> rows(3);
  const InputTensor shape{{DType::f32, {1, 3}}, rows.data()};
  EXPECT_THAT(error_of([&] { training.program.train_step(training.state, std::span(&shape, 1)); }),
              HasSubstr("input 'x' has shape [1, 3]"));
  const InputTensor type{{DType::i32, {1, 2}}, rows.data()};
  EXPECT_THAT(error_of([&] { training.program.train_step(training.state, std::span(&type, 1)); }),
              HasSubstr("input 'x' is int32, expected float32"));
  training.state.tensors.erase("w");
  EXPECT_THAT(error_of([&] { training.step({1, 1}); }), HasSubstr("no value for 'w'"));
  EXPECT_EQ(training.state.steps, 0);
}

TEST(TrainingProgram, RefusesModelsAndOptionsThatAreWrong) {
  TrainingOptions options = sgd();
  options.loss = "y";
  EXPECT_THAT(error_of([&] { Training training(options); }), HasSubstr("expected a single float"));
  options.loss = "z";
  EXPECT_THAT(error_of([&] { Training training(options); }),
              HasSubstr("no output 'z' to be the loss; there are loss, y"));
  options = sgd(0);
  EXPECT_THAT(error_of([&] { Training training(options); }), HasSubstr("accumulation is 0"));
  std::string text = kModel;
  text.replace(text.find(" grad"), 5, "");
  EXPECT_THAT(error_of([&] { Training training(sgd(), text); }),
              HasSubstr("depends on no parameter"));
  options = sgd();
  options.optimizer.groups = {{.parameters = {"v"}}};
  EXPECT_THAT(error_of([&] { Training(options).step({1, 1}); }), HasSubstr("'v', which is no"));
  options.optimizer.groups = {{.parameters = {"w", "w"}}};
  EXPECT_THAT(error_of([&] { Training(options).step({1, 1}); }), HasSubstr("in groups twice"));
  options = sgd();
  options.optimizer.step = "Other";
  EXPECT_THAT(error_of([&] { Training(options).step({1, 1}); }), HasSubstr("'Other' is none of"));
  options = sgd();
  options.memory_limit = 1;
  Training small(options);
  EXPECT_THROW(small.step({1, 1}), OutOfMemoryError);
  EXPECT_THAT(small.get("w"), ElementsAre(1, 2));
}

TEST(TrainingGraph, UsesLargeGradientsAsTheyCome) {
  const Graph model = parse_graph(
      "graph g (float32[b, 256] x, float32[256, 256] a [parameter grad], float32[256, 256] c "
      "[parameter grad]) => (loss) {\n"
      "  h = MatMul(x, a)\n  r = Relu(h)\n  y = MatMul(r, c)\n  loss = ReduceMean<keepdims = 0>(y)"
      "\n}");
  TrainingOptions options = sgd();
  options.loss = "loss";
  const auto arena = [&](double max_norm) {
    options.optimizer.max_norm = max_norm;
    const Graph graph = make_training_graph(model, options, StepKind::whole);
    std::vector<Dims> dims;
    for (const GraphInput& input : graph.inputs()) {
      const Shape& shape = graph.value(input.value).shape;
      dims.push_back(shape.empty() ? Dims{} : shape[0].is(256) ? Dims{256, 256} : Dims{4, 256});
    }
    const auto plan = make_execution_plan(graph, dims, cpu_kernels(), {.updates_in_place = true});
    for (const PlanStep& step : plan->steps) EXPECT_NE(step.node, kNoNode) << "a copy";
    return plan->arena_bytes;
  };
  const size_t gradient = 256 * 256 * sizeof(float);
  EXPECT_LT(arena(0), 2 * gradient) << "the gradients do not live together";
  EXPECT_GE(arena(1), 2 * gradient) << "the norm needs both";
}

TEST(PrepareModel, SelectsOutputs) {
  Graph graph = parse_graph("graph g (float32[2] x) => (a, b) {\n  a = Relu(x)\n  b = Neg(x)\n}");
  EXPECT_THROW(select_outputs(graph, {"c"}), InvalidModelError);
  select_outputs(graph, {"b"});
  ASSERT_EQ(graph.outputs().size(), 1U);
  EXPECT_EQ(graph.outputs()[0].name, "b");
  EXPECT_EQ(graph.order().size(), 1U);
}

TEST(PrepareModel, DrawsDropoutAnewInEachRun) {
  Graph graph = parse_graph(
      "graph g (float32[64] x) => (y, m) {\n"
      "  h, m = Dropout<seed = 3>(x, float32 0.5, bool true)\n"
      "  y, _ = Dropout<seed = 3>(h, float32 0.5, bool true)\n}");
  draw_dropout_per_run(graph);
  std::vector<int64_t> streams;
  for (NodeId id : graph.order()) {
    const Node& node = graph.node(id);
    EXPECT_EQ(node.domain, kOrtrainDomain);
    if (node.op == "Dropout") streams.push_back(std::get<int64_t>(node.attributes.at("stream")));
  }
  ASSERT_EQ(streams.size(), 2U);
  EXPECT_NE(streams[0], streams[1]);
  EXPECT_EQ(graph.inputs().back().role, InputRole::seed);
}

TEST(PrepareModel, LeavesOutTraining) {
  Graph graph = parse_graph(
      "graph g (float32[2, 3, 4] x, float32[3] scale, float32[3] bias, float32[3] mean [buffer], "
      "float32[3] var [buffer], int64[] s [seed]) => (y, mask, n as mean_next [buffer_update "
      "mean]) "
      "{\n"
      "  h, n, v = BatchNormalization<training_mode = 1>(x, scale, bias, mean, var)\n"
      "  d, mask = Dropout(h, float32 0.5, bool true)\n"
      "  y = ortrain::Dropout<ratio = 0.5>(d, s)\n}");
  leave_out_training(graph);
  ASSERT_EQ(graph.outputs().size(), 2U);
  int dropouts = 0;
  for (NodeId id : graph.order()) {
    const Node& node = graph.node(id);
    dropouts += node.op == "Dropout";
    if (node.op == "BatchNormalization") {
      EXPECT_EQ(std::get<int64_t>(node.attributes.at("training_mode")), 0);
    }
  }
  EXPECT_EQ(dropouts, 0);
}

TEST(TrainingState, CountsTheUpdatesOfEachParameter) {
  TrainingState state;
  using Updates = std::map<std::string, int64_t>;
  const auto step = [&](const std::vector<std::string>& parameters) {
    state.begin_update(parameters);
    ++state.steps;
  };
  step({"a", "b"});
  step({"a", "b"});
  EXPECT_TRUE(state.updates_alike());
  step({"b", "c"});
  EXPECT_FALSE(state.updates_alike());
  EXPECT_EQ(state.updates(), (Updates{{"a", 2}, {"b", 3}, {"c", 1}}));
  state.begin_update({"a"});  // of which nothing came
  step({"a"});
  step({"a", "c"});
  EXPECT_EQ(state.updates(), (Updates{{"a", 4}, {"b", 3}, {"c", 2}}));
  EXPECT_EQ(state.updates_of("d"), 0);
  // Of older files nothing is known: those that have states have been updated in each step.
  state.set_updates({{"a", 1}});
  state.optimizer["b:exp_avg"] = MutableTensor::zeros({DType::f32, {1}});
  state.optimizer["c:grad"] = MutableTensor::zeros({DType::f32, {1}});
  EXPECT_EQ(state.updates(), (Updates{{"a", 1}, {"b", 5}, {"c", 0}}));
  step({"a", "b", "c"});
  EXPECT_EQ(state.updates(), (Updates{{"a", 2}, {"b", 6}, {"c", 1}}));
}

TEST(TrainingProgram, RefusesFilesOfWhichParametersHaveDifferentNumbers) {
  const auto graph = [](const std::string& step) {
    return parse_graph("graph g (int64 n [state \"" + step +
                       "\"], float32[2] w [parameter]) => (w2 [state_update \"w\"]) {\n"
                       "  f = Cast<to = 1>(n)\n  w2 = Mul(w, f)\n}");
  };
  const Graph model =
      parse_graph("graph g (float32[2] x, float32[2] w [parameter]) => (y) {\n  y = Mul(x, w)\n}");
  for (const char* step : {"optimizer:step:1", "optimizer:step:99999999999", "optimizer:step"}) {
    const TrainingProgram program(model, graph(step), model, cpu_kernels());
    TrainingState state;
    state.tensors["w"] = MutableTensor::zeros({DType::f32, {2}});
    state.kept_batches = 1;
    if (std::string(step) == "optimizer:step") {
      EXPECT_TRUE(program.optimizer_step(state).updated);
    } else {
      EXPECT_THROW(program.optimizer_step(state), InvalidModelError) << step;
    }
  }
}

// The optimizer alone for two elements of `w`, with the memory of another state.
struct Sliced {
  explicit Sliced(TrainingOptions options, std::vector<ParameterSlice> owned)
      : program(parse_graph(kWideModel), with(std::move(options), std::move(owned)),
                cpu_kernels()) {
    state.learning_rate = 0.5;
    state.kept_batches = 1;
  }
  static TrainingOptions with(TrainingOptions options, std::vector<ParameterSlice> owned) {
    options.loss = "loss";
    options.owned = std::move(owned);
    return options;
  }
  void set(std::map<std::string, MutableTensor>& tensors, const std::string& target,
           const std::vector<float>& values) {
    tensors[target] = MutableTensor::copy_of(
        TensorData::from_values(DType::f32, {static_cast<int64_t>(values.size())}, values));
  }
  static std::vector<float> values(const MutableTensor& tensor) {
    const auto* data = static_cast<const float*>(tensor.data);
    return {data, data + tensor.spec.numel()};
  }

  static constexpr const char* kWideModel =
      "graph g (float32[b, 3] x, float32[3] w [parameter grad]) => (loss) {\n"
      "  y = Mul(x, w)\n  loss = ReduceSum<keepdims = 0>(y)\n}";
  TrainingProgram program;
  TrainingState state;
};

TEST(TrainingProgram, UpdatesTheSlicesThatItOwns) {
  Sliced sliced(sgd(), {{"w", 1, 3}});
  sliced.set(sliced.state.tensors, "w", {2, 3});
  sliced.set(sliced.state.optimizer, "w:owned_grad", {4, 8});
  EXPECT_TRUE(sliced.program.optimizer_step(sliced.state).updated);
  EXPECT_THAT(Sliced::values(sliced.state.tensors.at("w")), ElementsAre(0, -1));
  EXPECT_FALSE(sliced.state.optimizer.contains("w:grad")) << "no norm is needed";
}

TEST(TrainingProgram, ClipsSlicesByTheNormOfWholeGradients) {
  Sliced sliced(sgd(1, 2.5), {{"w", 1, 3}});
  sliced.set(sliced.state.tensors, "w", {2, 3});
  sliced.set(sliced.state.optimizer, "w:grad", {3, 0, 4});
  sliced.set(sliced.state.optimizer, "w:owned_grad", {0, 4});
  const StepResult result = sliced.program.optimizer_step(sliced.state);
  EXPECT_EQ(*result.gradient_norm, 5);
  EXPECT_EQ(Sliced::values(sliced.state.tensors.at("w"))[0], 2);
  EXPECT_NEAR(Sliced::values(sliced.state.tensors.at("w"))[1], 3 - 0.5 * 2, 1e-5);
}

TEST(TrainingProgram, OwnsNothingOfAModel) {
  Sliced sliced(sgd(1, 1.0), {});
  sliced.set(sliced.state.optimizer, "w:grad", {3, 0, 4});
  EXPECT_EQ(*sliced.program.optimizer_step(sliced.state).gradient_norm, 5);
}

TEST(TrainingProgram, RefusesSlicesThatDoNotFit) {
  const auto refusal = [](TrainingOptions options, std::vector<ParameterSlice> owned) {
    Sliced sliced(std::move(options), std::move(owned));
    try {
      sliced.program.optimizer_step(sliced.state);
    } catch (const InvalidModelError& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  EXPECT_THAT(refusal(sgd(), {{"w", 1, 4}}),
              HasSubstr("elements 1 to 4 of 'w' are owned, it has 3"));
  EXPECT_THAT(refusal(sgd(), {{"w", 2, 2}}), HasSubstr("elements 2 to 2"));
  EXPECT_THAT(refusal(sgd(), {{"w", 0, 1}, {"w", 1, 2}}), HasSubstr("two slices of 'w'"));
  EXPECT_THAT(refusal({.optimizer = {.step = "LambStep"}}, {{"w", 0, 1}}),
              HasSubstr("need the function sum_norms"));
}

// Adds the norms of the elements that the other half has.
class OtherHalf : public ExternalFunction {
 public:
  std::shared_ptr<void> forward(std::span<const ExternalTensor> operands,
                                std::span<const ExternalTensor> results,
                                std::span<const int64_t>) const override {
    EXPECT_EQ(*static_cast<const int64_t*>(operands[0].data), 0);
    for (size_t i = 0; i < 2; ++i) {
      mine[i] = static_cast<const double*>(operands[1].data)[i];
      static_cast<double*>(results[0].data)[i] = mine[i] + other[i];
    }
    return nullptr;
  }
  void backward(void*, std::span<const int64_t>, std::span<const ExternalTensor>,
                std::span<const int64_t>, std::span<const ExternalTensor>) const override {}

  mutable std::array<double, 2> mine{};
  std::array<double, 2> other{};
};

TEST(TrainingProgram, LambOnSlicesIsLambOnTheWhole) {
  const TrainingOptions options{
      .optimizer = {.step = "LambStep", .attributes = {{"weight_decay", 0.1}}}};
  const std::vector<float> parameters{1, 2, 3}, gradients{0.5, -1, 2};
  Sliced whole(options, {});
  whole.program =
      TrainingProgram(parse_graph(Sliced::kWideModel), Training::with_loss(options), cpu_kernels());
  whole.set(whole.state.tensors, "w", parameters);
  whole.set(whole.state.optimizer, "w:grad", gradients);
  whole.program.optimizer_step(whole.state);

  const auto function = std::make_shared<OtherHalf>();
  ExternalFunctions::instance().add("test::other_half", function);
  TrainingOptions sliced_options = options;
  sliced_options.sum_norms = "test::other_half";
  const std::vector<ParameterSlice> halves{{"w", 0, 1}, {"w", 1, 3}};
  std::array<std::array<double, 2>, 2> norms{};
  std::vector<float> made;
  for (const bool known : {false, true}) {  // once to learn each other's norms
    made.clear();
    for (size_t half = 0; half < 2; ++half) {
      const ParameterSlice& slice = halves[half];
      Sliced sliced(sliced_options, {slice});
      const auto part = [&](const std::vector<float>& all) {
        return std::vector<float>(all.begin() + slice.begin, all.begin() + slice.end);
      };
      sliced.set(sliced.state.tensors, "w", part(parameters));
      sliced.set(sliced.state.optimizer, "w:owned_grad", part(gradients));
      function->other = known ? norms[1 - half] : std::array<double, 2>{};
      sliced.program.optimizer_step(sliced.state);
      norms[half] = function->mine;
      for (float value : Sliced::values(sliced.state.tensors.at("w"))) made.push_back(value);
    }
  }
  ExternalFunctions::instance().remove("test::other_half");
  EXPECT_THAT(made, ::testing::Pointwise(::testing::FloatNear(1e-6F),
                                         Sliced::values(whole.state.tensors.at("w"))));
}

// Files may list outputs in any order.
TEST(TrainingProgram, UserOutputsComeFirst) {
  const char* const text =
      "graph g (float32[b, 2] x, float32[2] w [parameter grad], float32[2] s [buffer \"s\"]) =>\n"
      "    (moved [buffer_update \"s\"], loss, y) {\n"
      "  moved = Add(s, w)\n  y = Mul(x, w)\n  loss = ReduceSum<keepdims = 0>(y)\n}";
  Training training(sgd(), text);
  training.set("s", {0, 0});
  const StepResult result = training.step({1, 2});
  ASSERT_EQ(result.outputs.size(), 2U);
  ASSERT_NE(result.outputs[0].block, nullptr);
  EXPECT_EQ(*static_cast<const float*>(result.outputs[0].block->data()), 1 * 1 + 2 * 2);
  EXPECT_EQ(result.outputs[1].spec.dims, (Dims{1, 2}));
  EXPECT_THAT(training.get("s"), ElementsAre(1, 2));
}

TEST(TrainingProgram, InputsThatNoStepGivesAreRefused) {
  const auto refusal = [](const std::string& input) -> std::string {
    const std::string text = "graph g (float32[b, 2] x, float32[2] w [parameter grad], " + input +
                             ") => (loss) {\n  y = Mul(x, w)\n"
                             "  loss = ReduceSum<keepdims = 0>(y)\n}";
    try {
      Training training(sgd(), text);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(refusal("float32[2] d [gradient \"x\"]"), HasSubstr("has the role gradient"));
  EXPECT_THAT(refusal("int64[2] d [derived]"), HasSubstr("has the role derived"));
  EXPECT_THAT(refusal("float32 n [state \"optimizer:step\"]"),
              HasSubstr("'optimizer:step' is int64, expected float32"));
  EXPECT_THAT(refusal("float64[2] n [state \"optimizer:rate\"]"),
              HasSubstr("has shape [], expected [2]"));
  EXPECT_EQ(refusal("float64 n [state \"optimizer:rate\"]"), "");
}

TEST(TrainingProgram, RequiresFittingTensors) {
  Training training(sgd());
  training.program.require_tensors(training.state);
  training.set("w", {1, 2, 3});
  EXPECT_THROW(training.program.require_tensors(training.state), ShapeError);
  training.state.tensors.erase("w");
  EXPECT_THROW(training.program.require_tensors(training.state), InvalidModelError);
}

}  // namespace
}  // namespace ortrain
