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
