// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <map>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/runtime/session.h"
#include "ortrain/testing/harness.h"

namespace ortrain {
namespace {

struct Layer {
  const char* op;  // in domain "ortrain"
  int64_t gates;
  bool has_cell;
};

void PrintTo(const Layer& layer, std::ostream* out) { *out << layer.op; }

constexpr int64_t kSteps = 4, kBatch = 2, kInput = 3, kHidden = 5;

// The inputs x, h0 (c0), w_ih, w_hh, b_ih, b_hh.
std::vector<Dims> input_dims(const Layer& layer) {
  std::vector<Dims> dims{{kSteps, kBatch, kInput}, {kBatch, kHidden}};
  if (layer.has_cell) dims.push_back({kBatch, kHidden});
  const int64_t width = layer.gates * kHidden;
  for (const Dims& d : {Dims{width, kInput}, Dims{width, kHidden}, Dims{width}, Dims{width}}) {
    dims.push_back(d);
  }
  return dims;
}

std::vector<TensorData> inputs_of(const Layer& layer) {
  testing::OpCase op_case{
      .op = std::string("ortrain::") + layer.op, .name = "inputs", .inputs = {}};
  for (const Dims& dims : input_dims(layer)) {
    op_case.inputs.push_back(testing::CaseInput::uniform(dims, -0.6, 0.6));
  }
  return testing::make_inputs(op_case, DType::f64);
}

// Gradients by input index when only `trained` inputs want one; ones come in for y.
std::map<size_t, std::vector<double>> gradients(const Layer& layer, std::vector<bool> trained) {
  const std::vector<TensorData> inputs = inputs_of(layer);
  Graph graph;
  std::vector<ValueId> values;
  for (size_t i = 0; i < inputs.size(); ++i) {
    values.push_back(graph.add_input({.role = InputRole::user, .requires_grad = trained[i]},
                                     "x" + std::to_string(i), DType::f64,
                                     to_shape(inputs[i].dims())));
  }
  const ValueId y = GraphBuilder(graph).own(layer.op, values);  // no other output is wanted
  graph.add_output({.value = y, .name = "y"});
  build_backward(graph, {.output_indices = {0}});
  graph.remove_dead_nodes();
  graph.sort();

  auto session = std::make_shared<Session>(graph, cpu_kernels());
  std::vector<Dims> dims;
  const std::vector<double> ones(kSteps * kBatch * kHidden, 1.0);
  std::vector<const void*> forward, backward;
  for (size_t i = 0; i < graph.inputs().size(); ++i) {
    const bool is_gradient = i >= inputs.size();
    dims.push_back(is_gradient ? Dims{} : inputs[i].dims());
    forward.push_back(is_gradient ? nullptr : inputs[i].data());
    backward.push_back(is_gradient ? ones.data() : nullptr);
  }
  RunContext context(session, session->plan(dims));
  context.forward(forward);
  const std::vector<RunOutput> made = context.backward(backward);
  std::map<size_t, std::vector<double>> result;
  for (size_t k = 0; k < made.size(); ++k) {
    if (graph.outputs()[k].role != OutputRole::gradient) continue;
    const auto* data = static_cast<const double*>(made[k].block->data());
    const size_t index = static_cast<size_t>(std::stoi(graph.outputs()[k].target.substr(1)));
    result[index] = std::vector<double>(data, data + made[k].spec.numel());
  }
  return result;
}

class RecurrentLayers : public ::testing::TestWithParam<Layer> {};

TEST_P(RecurrentLayers, FrozenInputsChangeNoOtherGradient) {
  const size_t count = input_dims(GetParam()).size();
  const auto all = gradients(GetParam(), std::vector<bool>(count, true));
  ASSERT_EQ(all.size(), count);
  for (size_t i = 0; i < count; ++i) {
    std::vector<bool> one(count, false);
    one[i] = true;
    const auto alone = gradients(GetParam(), one);
    ASSERT_EQ(alone.size(), 1u);
    EXPECT_EQ(alone.at(i), all.at(i)) << "input " << i;
  }
}

TEST_P(RecurrentLayers, UnwantedOutputsChangeNothing) {
  testing::OpCase op_case{
      .op = std::string("ortrain::") + GetParam().op, .name = "all", .inputs = {}};
  for (const Dims& dims : input_dims(GetParam())) {
    op_case.inputs.push_back(testing::CaseInput::uniform(dims, -0.6, 0.6));
  }
  const std::vector<TensorData> inputs = testing::make_inputs(op_case, DType::f32);
  const TensorData alone = testing::run_kernel(op_case, inputs, "", cpu_kernels())[0];
  op_case.outputs = GetParam().gates == 4 ? 5 : GetParam().gates == 3 ? 3 : 2;
  EXPECT_TRUE(alone.equals(testing::run_kernel(op_case, inputs, "", cpu_kernels())[0]));
}

INSTANTIATE_TEST_SUITE_P(All, RecurrentLayers,
                         ::testing::Values(Layer{"LSTM", 4, true}, Layer{"GRU", 3, false},
                                           Layer{"RNN", 1, false}));

// The steps would be gone through, one call of a matrix product each.
TEST(Recurrent, StepsOfAnEmptyBatchCostNoTime) {
  constexpr int64_t kMany = int64_t{1} << 25;
  using In = testing::CaseInput;
  const In sequence = In::normal({kMany, 0, kHidden}), state = In::normal({0, kHidden});
  const auto gates = [](int64_t n, int64_t width) { return In::normal({n * kHidden, width}); };
  const In saved = In::normal({kMany, 0, 4 * kHidden}), x = In::normal({kMany, 0, kInput});
  const std::vector<testing::OpCase> cases{
      {.op = "ortrain::RNNGrad",
       .name = "empty_batch",
       .inputs = {sequence, state, x, state, gates(1, kInput), gates(1, kHidden), sequence}},
      {.op = "ortrain::GRUGrad",
       .name = "empty_batch",
       .inputs = {sequence, state, x, state, gates(3, kInput), gates(3, kHidden), sequence, saved}},
      {.op = "ortrain::LSTMGrad",
       .name = "empty_batch",
       .inputs = {sequence, state, state, x, state, state, gates(4, kInput), gates(4, kHidden),
                  sequence, saved, sequence}}};
  for (testing::OpCase op_case : cases) {
    op_case.outputs = 5;
    const auto start = std::chrono::steady_clock::now();
    testing::run_kernel(op_case, testing::make_inputs(op_case, DType::f32), "", cpu_kernels());
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    EXPECT_LT(seconds.count(), 30.0) << op_case.op;
  }
}

}  // namespace
}  // namespace ortrain
