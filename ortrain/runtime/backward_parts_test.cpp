// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/backward_parts.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/base/error.h"
#include "ortrain/ir/text.h"
#include "ortrain/runtime/session.h"

namespace ortrain {
namespace {

// A chain: the gradient of the last weight is final first. `w1` is used twice.
constexpr char kChain[] = R"(
graph g (float32[4, 4] x, float32[4, 4] w1 [parameter "w1" grad],
         float32[4, 4] w2 [parameter "w2" grad], float32[4, 4] w3 [parameter "w3" grad]) => (y) {
  a = MatMul(x, w1)
  b = MatMul(a, w2)
  c = Tanh(b)
  d = MatMul(c, w3)
  y = MatMul(d, w1)
}
)";

class BackwardParts : public ::testing::Test {
 protected:
  BackwardParts() {
    Graph graph = parse_graph(kChain);
    build_backward(graph, {.output_indices = {0}});
    graph.remove_dead_nodes();
    graph.sort();
    session_ = std::make_shared<Session>(graph, cpu_kernels());
    for (const GraphInput& input : graph.inputs()) {
      std::vector<float> values(16);
      for (size_t j = 0; j < values.size(); ++j) {
        values[j] = static_cast<float>((j * 5 + tensors_.size() * 3) % 11) * 0.1f - 0.5f;
      }
      tensors_.push_back(std::move(values));
      const bool gradient = input.role == InputRole::gradient;
      forward_.push_back(gradient ? nullptr : tensors_.back().data());
      backward_.push_back(gradient ? tensors_.back().data() : nullptr);
    }
    plan_ = session_->plan(std::vector<Dims>(forward_.size(), Dims{4, 4}));
  }

  static void collect(const std::vector<RunOutput>& outputs,
                      std::vector<std::vector<float>>& values) {
    values.resize(outputs.size());
    for (size_t k = 0; k < outputs.size(); ++k) {
      if (!outputs[k].block) continue;
      EXPECT_TRUE(values[k].empty()) << "output " << k << " came twice";
      const auto* data = static_cast<const float*>(outputs[k].block->data());
      values[k].assign(data, data + outputs[k].spec.numel());
    }
  }

  std::shared_ptr<Session> session_;
  std::shared_ptr<const ExecutionPlan> plan_;
  std::vector<std::vector<float>> tensors_;
  std::vector<const void*> forward_, backward_;
};

TEST_F(BackwardParts, EachGradientIsInOnePart) {
  const auto parts = backward_parts(session_->graph(), *plan_, 1);
  ASSERT_EQ(parts.size(), 3u);
  std::vector<size_t> all;
  for (const BackwardPart& part : parts) {
    all.insert(all.end(), part.gradients.begin(), part.gradients.end());
  }
  std::ranges::sort(all);
  EXPECT_EQ(all, (std::vector<size_t>{0, 1, 2}));
  // w3's, then w2's, then that of w1, which the first and the last node use.
  EXPECT_EQ(parts[0].gradients, std::vector<size_t>{2});
  EXPECT_EQ(parts[1].gradients, std::vector<size_t>{1});
  EXPECT_EQ(parts[2].gradients, std::vector<size_t>{0});
  EXPECT_LT(parts[0].end, parts[1].end);
  EXPECT_EQ(parts[2].end, plan_->steps.size());
}

TEST_F(BackwardParts, SmallGradientsAreTakenTogether) {
  EXPECT_EQ(backward_parts(session_->graph(), *plan_, 65).size(), 2u);
  const auto whole = backward_parts(session_->graph(), *plan_, 1000);
  ASSERT_EQ(whole.size(), 1u);
  EXPECT_EQ(whole[0].gradients.size(), 3u);
  EXPECT_EQ(whole[0].end, plan_->steps.size());
}

TEST(FinishedUpdates, AreThoseThatNoLaterStepTouches) {
  Graph graph = parse_graph(R"(
graph g (float32[4] x, float32[4] a [buffer "a"], float32[4] b [buffer "b"], float32[4] c [buffer "c"])
    => (y, new_b [buffer_update "b"], new_a [buffer_update "a"]) {
  new_b = Add(b, x)
  t = Mul(x, c)
  new_a = Mul(a, t)
  y = Tanh(new_a)
}
)");
  Session session(graph, cpu_kernels(), {.plan = {.updates_in_place = true}});
  const auto plan = session.plan({{4}, {4}, {4}, {4}});
  const auto each = finished_updates(session.graph(), *plan, 1);
  ASSERT_EQ(each.size(), 2u);
  EXPECT_EQ(each[0].outputs, std::vector<size_t>{1});
  EXPECT_EQ(each[1].outputs, std::vector<size_t>{2});
  EXPECT_EQ(each[0].end, 1u);
  EXPECT_EQ(each[1].end, plan->num_forward_steps) << "new_a is read for y";
  const auto together = finished_updates(session.graph(), *plan, 17);
  ASSERT_EQ(together.size(), 1u);
  EXPECT_EQ(together[0].outputs.size(), 2u);
}

// The names of the inputs that the backward reads where they are.
std::vector<std::string> inputs_read(const Graph& graph, const ExecutionPlan& plan) {
  std::vector<std::string> names;
  for (const auto& [index, end] : backward_reads(graph, plan).inputs) {
    EXPECT_GT(end, plan.num_forward_steps);
    EXPECT_LE(end, plan.steps.size());
    names.push_back(graph.value(graph.inputs()[index].value).name);
  }
  return names;
}

TEST_F(BackwardParts, ReadInputsUpToAStep) {
  const Graph& graph = session_->graph();
  EXPECT_EQ(inputs_read(graph, *plan_), (std::vector<std::string>{"x", "w1", "w2", "w3"}));
  // w3 is read for the gradient of `c`, before w2 is; x for the last gradient of all.
  const std::vector<CallersMemory> reads = backward_reads(graph, *plan_).inputs;
  EXPECT_LT(reads[3].end, reads[2].end);
  const auto parts = backward_parts(graph, *plan_, 1);
  EXPECT_LE(reads[3].end, parts[1].end);
  EXPECT_LE(reads[2].end, parts[2].end);
  EXPECT_GT(reads[0].end, parts[1].end);
}

TEST(BackwardReads, FollowViewsAtTheShapesOfThePlan) {
  Graph graph = parse_graph(R"(
graph g (float32[n, 4] x [user grad], float32[4, 1] w [parameter "w" grad]) => (y) {
  t = Transpose<perm = [1, 0]>(x)
  y = Mul(t, w)
}
)");
  build_backward(graph, {.output_indices = {0}});
  graph.remove_dead_nodes();
  graph.sort();
  Session session(graph, cpu_kernels());
  EXPECT_EQ(inputs_read(graph, *session.plan({{3, 4}, {4, 1}, {4, 3}})),
            (std::vector<std::string>{"w"}));
  // The transpose of one row has the bytes of the row.
  EXPECT_EQ(inputs_read(graph, *session.plan({{1, 4}, {4, 1}, {4, 1}})),
            (std::vector<std::string>{"x", "w"}));
}

TEST(BackwardReads, LeaveOutWhatIsOnlyAdded) {
  Graph graph = parse_graph(R"(
graph g (float32[4, 4] x [user grad], float32[4] b [parameter "b" grad]) => (y) {
  a = Add(x, b)
  y = Tanh(a)
}
)");
  build_backward(graph, {.output_indices = {0}});
  graph.remove_dead_nodes();
  graph.sort();
  Session session(graph, cpu_kernels());
  const auto plan = session.plan({{4, 4}, {4}, {4, 4}});
  EXPECT_TRUE(inputs_read(graph, *plan).empty());
  // Tanh's gradient reads its result: a small one is given out as a copy.
  EXPECT_TRUE(backward_reads(graph, *plan).outputs.empty());
}

TEST(BackwardReads, NameLargeOutputs) {
  Graph graph = parse_graph(R"(
graph g (float32[n, 4] x [user grad]) => (y) {
  y = Tanh(x)
}
)");
  build_backward(graph, {.output_indices = {0}});
  graph.remove_dead_nodes();
  graph.sort();
  Session session(graph, cpu_kernels());
  const auto small = session.plan({{16, 4}, {16, 4}});
  EXPECT_TRUE(backward_reads(graph, *small).outputs.empty());
  const auto large = session.plan({{1 << 14, 4}, {1 << 14, 4}});
  const std::vector<CallersMemory> outputs = backward_reads(graph, *large).outputs;
  ASSERT_EQ(outputs.size(), 1u);
  EXPECT_EQ(outputs[0].index, 0u);
}

TEST_F(BackwardParts, ReadReplacedInputsInTheirNewPlace) {
  std::vector<std::vector<float>> expected, found;
  RunContext run(session_, plan_);
  run.forward(forward_);
  collect(run.backward(backward_), expected);
  run.forward(forward_);
  const std::vector<float> kept = tensors_[0];
  run.replace_input(0, kept.data());
  std::ranges::fill(tensors_[0], 99.0f);
  collect(run.backward(backward_), found);
  EXPECT_EQ(found, expected);
  EXPECT_THROW(run.replace_input(0, kept.data()), InternalError);  // no backward to come
}

TEST_F(BackwardParts, GiveWhatTheWholeGives) {
  std::vector<std::vector<float>> expected, found;
  RunContext whole(session_, plan_);
  whole.forward(forward_);
  collect(whole.backward(backward_), expected);

  RunContext run(session_, plan_);
  run.forward(forward_);
  run.begin_backward(backward_);
  for (const BackwardPart& part : backward_parts(session_->graph(), *plan_, 1)) {
    EXPECT_TRUE(run.in_backward());
    const std::vector<RunOutput> outputs = run.continue_backward(part.end);
    size_t position = 0;
    for (size_t k = 0; k < outputs.size(); ++k) {
      if (session_->graph().outputs()[k].role != OutputRole::gradient) continue;
      EXPECT_EQ(outputs[k].block != nullptr, std::ranges::count(part.gradients, position) == 1);
      ++position;
    }
    collect(outputs, found);
  }
  EXPECT_FALSE(run.in_backward());
  EXPECT_FALSE(run.can_run_backward());
  EXPECT_EQ(found, expected);
}

TEST_F(BackwardParts, WhatWasReturnedIsNotTouchedAgain) {
  RunContext run(session_, plan_);
  run.forward(forward_);
  run.begin_backward(backward_);
  const auto parts = backward_parts(session_->graph(), *plan_, 1);
  std::vector<RunOutput> first = run.continue_backward(parts[0].end);
  for (RunOutput& output : first) {
    if (output.block) std::fill_n(static_cast<float*>(output.block->data()), 16, 7.0f);
  }
  std::vector<std::vector<float>> expected, found;
  collect(run.continue_backward(plan_->steps.size()), found);
  RunContext whole(session_, plan_);
  whole.forward(forward_);
  collect(whole.backward(backward_), expected);
  for (size_t k = 0; k < found.size(); ++k) {
    if (found[k].empty()) continue;
    EXPECT_EQ(found[k], expected[k]);
  }
}

TEST_F(BackwardParts, NeedABeginning) {
  RunContext run(session_, plan_);
  EXPECT_THROW(run.begin_backward(backward_), InternalError);
  run.forward(forward_);
  EXPECT_THROW(run.continue_backward(1), InternalError);
  run.begin_backward(backward_);
  EXPECT_THROW(run.begin_backward(backward_), InternalError);
  run.forward(forward_);  // starts anew
  EXPECT_FALSE(run.in_backward());
}

}  // namespace
}  // namespace ortrain
