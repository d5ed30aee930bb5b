// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/memory_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/base/error.h"
#include "ortrain/ir/text.h"
#include "ortrain/passes/pipeline.h"
#include "ortrain/training/training_program.h"

namespace ortrain {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Graph with_backward(const std::string& text) {
  Graph graph = parse_graph(text);
  build_backward(graph, {.output_indices = {0}});
  graph.remove_dead_nodes();
  graph.sort();
  return graph;
}

// Layers of a product, a norm, dropout and a softmax each.
std::string layers(int count) {
  std::string text =
      "graph g (float32[n, 64] x [user grad], float32[64, 64] w [user grad], float32[64] s, "
      "int64[] seed [seed]) => (y) {\n  h0 = Mul(x, s)\n";
  for (int layer = 1; layer <= count; ++layer) {
    const std::string l = std::to_string(layer);
    text += "  a" + l + " = MatMul(h" + std::to_string(layer - 1) + ", w)\n";
    text += "  norm" + l + " = LayerNormalization <axis = -1> (a" + l + ", s)\n";
    text += "  c" + l + " = ortrain::Dropout <stream = " + l + ", ratio = 0.25> (norm" + l +
            ", seed)\n";
    text += "  d" + l + " = Tanh(c" + l + ")\n";
    text += "  h" + l + " = Softmax <axis = 1> (d" + l + ")\n";
  }
  return text + "  y = ReduceSum<keepdims = 1>(h" + std::to_string(count) + ")\n}\n";
}

struct Results {
  std::vector<std::vector<float>> values;
  std::shared_ptr<const ExecutionPlan> plan;
};

std::shared_ptr<Session> session_of(const Graph& unfused, MemoryBudget budget) {
  Graph fused = unfused;
  run_pipeline(fused, "fuse");
  Session::Options options;
  if (budget.is_set()) options.make_plan = plan_within(unfused, budget);
  return std::make_shared<Session>(std::move(fused), cpu_kernels(), std::move(options));
}

std::vector<Dims> dims_of(const Graph& graph, int64_t rows) {
  std::vector<Dims> dims;
  for (const GraphInput& input : graph.inputs()) {
    Dims& made = dims.emplace_back();
    for (const Dim& extent : graph.value(input.value).shape) {
      made.push_back(extent.is_constant() ? extent.constant() : rows);
    }
  }
  return dims;
}

Results run(const std::shared_ptr<Session>& session, int64_t rows) {
  const Graph& graph = session->graph();
  const std::vector<Dims> dims = dims_of(graph, rows);
  static const int64_t seed = 7;
  std::vector<std::vector<float>> tensors(dims.size());
  std::vector<const void*> forward, backward;
  for (size_t i = 0; i < dims.size(); ++i) {
    const InputRole role = graph.inputs()[i].role;
    int64_t count = 1;
    for (int64_t extent : dims[i]) count *= extent;
    for (int64_t j = 0; j < count; ++j) {
      tensors[i].push_back(static_cast<float>((j * 7 + static_cast<int64_t>(i) * 3) % 23) * 0.1f -
                           1.0f);
    }
    const void* data = role == InputRole::seed ? static_cast<const void*>(&seed)
                                               : static_cast<const void*>(tensors[i].data());
    forward.push_back(role == InputRole::gradient ? nullptr : data);
    backward.push_back(role == InputRole::gradient ? data : nullptr);
  }
  Results results{.plan = session->plan(dims)};
  RunContext context(session, results.plan);
  for (const auto& outputs : {context.forward(forward), context.backward(backward)}) {
    for (const RunOutput& output : outputs) {
      if (!output.block) continue;
      const auto* data = static_cast<const float*>(output.block->data());
      results.values.emplace_back(data, data + output.spec.numel());
    }
  }
  return results;
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const OutOfMemoryError& error) {
    return error.what();
  }
  return "no error";
}

TEST(MemoryBudget, PlansStayWithinItAndNumbersStayTheSame) {
  const Graph unfused = with_backward(layers(8));
  const Results without = run(session_of(unfused, {}), 100);
  EXPECT_FALSE(without.plan->recomputation.has_value());
  double time = 1;
  for (const double share : {0.9, 0.7, 0.6, 0.52}) {
    const Results within = run(session_of(unfused, {.share = share}), 100);
    EXPECT_LE(static_cast<double>(within.plan->total_bytes()),
              share * static_cast<double>(without.plan->total_bytes()));
    EXPECT_EQ(within.values, without.values) << share;
    const RecomputationSummary& made = *within.plan->recomputation;
    EXPECT_EQ(made.total_bytes_without, without.plan->total_bytes());
    EXPECT_EQ(made.arena_bytes_without, without.plan->arena_bytes);
    EXPECT_FALSE(made.nodes.empty());
    EXPECT_GT(made.bytes, 0);
    EXPECT_GE(made.time_share, time) << "a smaller budget takes more time";
    time = made.time_share;
  }
}

TEST(MemoryBudget, ProductsRunAgainWhereItAsksForThat) {
  const auto session = session_of(with_backward(layers(64)), {.share = 0.2});
  const auto plan = session->plan(dims_of(session->graph(), 100));
  EXPECT_GT(plan->recomputation->nodes.at("MatMul"), 0);
}

TEST(MemoryBudget, NeighbouringShapesShareARewrittenGraph) {
  const Graph unfused = with_backward(layers(8));
  const auto session = session_of(unfused, {.share = 0.6});
  const Results first = run(session, 100), second = run(session, 101), third = run(session, 160);
  ASSERT_NE(first.plan->rewritten, nullptr);
  EXPECT_EQ(second.plan->rewritten, first.plan->rewritten);
  for (const auto& [within, rows] : {std::pair(first, 100), {second, 101}, {third, 160}}) {
    EXPECT_EQ(within.values, run(session_of(unfused, {}), rows).values);
    const auto alone = run(session_of(unfused, {.share = 0.6}), rows).plan;
    EXPECT_EQ(within.plan->total_bytes(), alone->total_bytes());
    EXPECT_EQ(within.plan->recomputation->nodes, alone->recomputation->nodes);
  }
}

TEST(MemoryBudget, WhatFitsIsLeftAlone) {
  const Graph unfused = with_backward(layers(4));
  const Results without = run(session_of(unfused, {}), 50);
  const Results within = run(session_of(unfused, {.bytes = without.plan->total_bytes()}), 50);
  EXPECT_EQ(within.plan->rewritten, nullptr);
  EXPECT_TRUE(within.plan->recomputation->nodes.empty());
  EXPECT_EQ(within.plan->total_bytes(), without.plan->total_bytes());
  EXPECT_EQ(within.plan->recomputation->time_share, 1);
}

TEST(MemoryBudget, HoldsForTheShapesOfEachPlan) {
  const Graph unfused = with_backward(layers(6));
  const auto free = session_of(unfused, {});
  const size_t bytes = free->plan(dims_of(free->graph(), 60))->total_bytes();
  const auto session = session_of(unfused, {.bytes = bytes});
  const auto small = session->plan(dims_of(session->graph(), 60));
  const auto large = session->plan(dims_of(session->graph(), 90));
  EXPECT_TRUE(small->recomputation->nodes.empty());
  EXPECT_FALSE(large->recomputation->nodes.empty());
  EXPECT_LE(large->total_bytes(), bytes);
  EXPECT_EQ(run(session, 90).values, run(free, 90).values);
  EXPECT_EQ(run(session, 60).values, run(free, 60).values);
}

// All layers alike: one price frees all or none of them, and a chain through all of them would be
// in memory at once.
TEST(MemoryBudget, LongChainsAreComputedAgainPartByPart) {
  const Graph unfused = with_backward(layers(64));
  const Results without = run(session_of(unfused, {}), 64);
  const Results within = run(session_of(unfused, {.share = 0.2}), 64);
  EXPECT_EQ(within.values, without.values);
  // Every node runs twice at most.
  EXPECT_LT(within.plan->recomputation->time_share, 1.7);
}

TEST(MemoryBudget, SaysWhatBoundsAStepThatDoesNotFit) {
  const auto session = session_of(with_backward(layers(6)), {.bytes = 1000});
  const std::string error = error_of([&] { session->plan(dims_of(session->graph(), 100)); });
  EXPECT_THAT(error, AllOf(HasSubstr("max_memory of 1000 bytes cannot be reached"),
                           HasSubstr("without recomputation the step takes"),
                           HasSubstr("the least that recomputation reaches is"),
                           HasSubstr("gradients of 41984"), HasSubstr("the largest")));
}

TEST(MemoryBudget, AForwardFitsOrIsRefused) {
  const Graph forward = parse_graph(layers(2));
  EXPECT_NE(session_of(forward, {.share = 0.01})->plan(dims_of(forward, 10)), nullptr);
  const auto session = session_of(forward, {.bytes = 100});
  EXPECT_THAT(error_of([&] { session->plan(dims_of(forward, 10)); }),
              HasSubstr("the forward alone takes"));
}

// Parameters are updated in place while the backward goes on: what is computed again reads them
// before that.
TEST(MemoryBudget, TrainingStepsAreTheSame) {
  std::string text = "graph g (float32[b, 128] x, int64[] seed [seed]";
  for (int layer = 1; layer <= 6; ++layer) {
    text += ", float32[128, 128] w" + std::to_string(layer) + " [parameter grad]";
  }
  text += ") => (loss) {\n  h0 = Identity(x)\n";
  for (int layer = 1; layer <= 6; ++layer) {
    const std::string l = std::to_string(layer);
    text += "  a" + l + " = MatMul(h" + std::to_string(layer - 1) + ", w" + l + ")\n";
    text +=
        "  b" + l + " = ortrain::Dropout <stream = " + l + ", ratio = 0.25> (a" + l + ", seed)\n";
    text += "  c" + l + " = Softmax <axis = 1> (b" + l + ")\n";
    text += "  h" + l + " = Tanh(c" + l + ")\n";
  }
  text += "  loss = ReduceMean<keepdims = 0>(h6)\n}\n";
  const Graph model = parse_graph(text);
  for (const double max_norm : {0.0, 1.0}) {
    std::vector<std::vector<float>> weights;
    size_t bytes = 0;
    for (const double share : {0.0, 0.7}) {
      const TrainingProgram program(
          model, {.loss = "loss", .optimizer = {.max_norm = max_norm}, .budget = {.share = share}},
          cpu_kernels());
      TrainingState state;
      state.learning_rate = 0.5;
      for (int layer = 1; layer <= 6; ++layer) {
        std::vector<float> values(128 * 128);
        for (size_t i = 0; i < values.size(); ++i) {
          values[i] = static_cast<float>((i * 31 + static_cast<size_t>(layer)) % 17) * 0.05f - 0.4f;
        }
        state.tensors["w" + std::to_string(layer)] =
            MutableTensor::copy_of(TensorData::from_values(DType::f32, {128, 128}, values));
      }
      std::vector<float> rows(300 * 128);
      for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 13) * 0.1f;
      const InputTensor input{{DType::f32, {300, 128}}, rows.data()};
      for (int step = 0; step < 3; ++step) program.train_step(state, std::span(&input, 1));
      const auto plan = program.last_plan();
      std::vector<float>& all = weights.emplace_back();
      for (const auto& [name, tensor] : state.tensors) {
        const auto* data = static_cast<const float*>(tensor.data);
        all.insert(all.end(), data, data + tensor.spec.numel());
      }
      if (share == 0) {
        bytes = plan->total_bytes();
        continue;
      }
      EXPECT_LE(static_cast<double>(plan->total_bytes()), share * static_cast<double>(bytes));
      EXPECT_FALSE(plan->recomputation->nodes.empty());
      for (const PlanStep& step : plan->steps) EXPECT_NE(step.node, kNoNode) << "a copy";
    }
    EXPECT_EQ(weights[0], weights[1]);
  }
}

}  // namespace
}  // namespace ortrain
