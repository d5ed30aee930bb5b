// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/execution_plan.h"

#include <gtest/gtest.h>

#include "ortrain/base/error.h"
#include "ortrain/ir/text.h"
#include "ortrain/runtime/session.h"

namespace ortrain {
namespace {

// A graph whose updates go to the memory of its inputs, all float32[4].
class InPlace {
 public:
  InPlace(const std::string& text, std::vector<std::vector<float>> inputs)
      : session_(std::make_shared<Session>(parse_graph(text), cpu_kernels(),
                                           Session::Options{.plan = {.updates_in_place = true}})),
        inputs(std::move(inputs)) {}

  void run() {
    std::vector<const void*> addresses;
    for (const std::vector<float>& input : inputs) addresses.push_back(input.data());
    RunContext context(session_, plan());
    outputs.clear();
    for (const RunOutput& output : context.forward(addresses)) {
      const auto* data = output.block ? static_cast<const float*>(output.block->data()) : nullptr;
      outputs.push_back(data ? std::vector<float>(data, data + 4) : std::vector<float>());
    }
  }

  std::shared_ptr<const ExecutionPlan> plan() {
    return session_->plan(std::vector<Dims>(inputs.size(), Dims{4}));
  }

  // Steps that only move bytes.
  int copies() {
    int count = 0;
    for (const PlanStep& step : plan()->steps) count += step.node == kNoNode;
    return count;
  }

 private:
  std::shared_ptr<Session> session_;

 public:
  std::vector<std::vector<float>> inputs;
  std::vector<std::vector<float>> outputs;
};

using Floats = std::vector<float>;

TEST(UpdatesInPlace, AreWrittenByTheNodeThatMakesThem) {
  InPlace graph(
      "graph g (float32[4] x, float32[4] w [parameter]) => (n [state_update w]) {\n"
      "  t = Mul(x, x)\n  n = Add(w, t)\n}",
      {{1, 2, 3, 4}, {10, 10, 10, 10}});
  graph.run();
  EXPECT_EQ(graph.inputs[1], (Floats{11, 14, 19, 26}));
  EXPECT_EQ(graph.copies(), 0);
  graph.run();
  EXPECT_EQ(graph.inputs[1], (Floats{12, 18, 28, 42}));
  EXPECT_EQ(graph.outputs[0], Floats());
  EXPECT_EQ(graph.plan()->forward_output_bytes, 0U);
}

TEST(UpdatesInPlace, FillStateThatNobodyReads) {
  InPlace graph(
      "graph g (float32[4] x, float32[4] s [state]) => (n [state_update s]) {\n"
      "  n = Mul(x, x)\n}",
      {{1, 2, 3, 4}, {10, 10, 10, 10}});
  graph.run();
  EXPECT_EQ(graph.inputs[1], (Floats{1, 4, 9, 16}));
  EXPECT_EQ(graph.copies(), 0);
}

TEST(UpdatesInPlace, WaitForLaterReaders) {
  InPlace graph(
      "graph g (float32[4] x, float32[4] w [parameter]) => (y, n [state_update w]) {\n"
      "  n = Add(w, x)\n  y = Mul(w, n)\n}",
      {{1, 2, 3, 4}, {10, 10, 10, 10}});
  graph.run();
  EXPECT_EQ(graph.outputs[0], (Floats{110, 120, 130, 140}));
  EXPECT_EQ(graph.inputs[1], (Floats{11, 12, 13, 14}));
  EXPECT_EQ(graph.copies(), 1);
}

TEST(UpdatesInPlace, WaitForReadersOfViews) {
  InPlace graph(
      "graph g (float32[4] x, float32[4] w [parameter]) => (y, n [state_update w]) {\n"
      "  v = Reshape(w, int64[1] {4})\n  n = Add(w, x)\n  y = Mul(v, n)\n}",
      {{1, 2, 3, 4}, {10, 10, 10, 10}});
  graph.run();
  EXPECT_EQ(graph.outputs[0], (Floats{110, 120, 130, 140}));
  EXPECT_EQ(graph.inputs[1], (Floats{11, 12, 13, 14}));
}

TEST(UpdatesInPlace, LeaveOutputsWithTheOldValue) {
  InPlace graph(
      "graph g (float32[4] x, float32[4] w [parameter]) => (w as old, n [state_update w]) {\n"
      "  n = Add(w, x)\n}",
      {{1, 2, 3, 4}, {10, 10, 10, 10}});
  graph.run();
  EXPECT_EQ(graph.outputs[0], (Floats{10, 10, 10, 10}));
  EXPECT_EQ(graph.inputs[1], (Floats{11, 12, 13, 14}));
}

TEST(UpdatesInPlace, ShareAValueWithAnOutputAndOtherInputs) {
  InPlace graph(
      "graph g (float32[4] x, float32[4] a [state], float32[4] b [buffer]) =>\n"
      "    (n as y, n as to_a [state_update a], n as to_b [buffer_update b]) {\n"
      "  n = Add(x, x)\n}",
      {{1, 2, 3, 4}, {0, 0, 0, 0}, {0, 0, 0, 0}});
  graph.run();
  const Floats expected{2, 4, 6, 8};
  EXPECT_EQ(graph.outputs[0], expected);
  EXPECT_EQ(graph.inputs[1], expected);
  EXPECT_EQ(graph.inputs[2], expected);
}

TEST(UpdatesInPlace, TakeOtherInputsAndConstants) {
  InPlace graph(
      "graph g (float32[4] x, float32[4] a [state], float32[4] b [state]) =>\n"
      "    (x as to_a [state_update a], c as to_b [state_update b]) {\n"
      "  const c = float32[4] {1, 2, 1, 2}\n}",
      {{1, 2, 3, 4}, {0, 0, 0, 0}, {0, 0, 0, 0}});
  graph.run();
  EXPECT_EQ(graph.inputs[1], (Floats{1, 2, 3, 4}));
  EXPECT_EQ(graph.inputs[2], (Floats{1, 2, 1, 2}));
}

TEST(UpdatesInPlace, LeaveAloneWhatStaysTheSame) {
  InPlace graph("graph g (float32[4] a [state]) => (a as n [state_update a]) {\n}", {{1, 2, 3, 4}});
  graph.run();
  EXPECT_EQ(graph.inputs[0], (Floats{1, 2, 3, 4}));
  EXPECT_EQ(graph.copies(), 0);
}

TEST(UpdatesInPlace, RefuseExchangesAndUnknownTargets) {
  InPlace swapped(
      "graph g (float32[4] a [state], float32[4] b [state]) =>\n"
      "    (b as to_a [state_update a], a as to_b [state_update b]) {\n}",
      {{1, 2, 3, 4}, {0, 0, 0, 0}});
  EXPECT_THROW(swapped.plan(), UnsupportedError);
  InPlace unknown("graph g (float32[4] x) => (y as n [state_update z]) {\n  y = Add(x, x)\n}",
                  {{1, 2, 3, 4}});
  EXPECT_THROW(unknown.plan(), InvalidModelError);
  InPlace wrong(
      "graph g (float32[4] x, float32[4] a [state]) => (y as n [state_update a]) {\n"
      "  y = ReduceSum<keepdims = 0>(x)\n}",
      {{1, 2, 3, 4}, {0, 0, 0, 0}});
  EXPECT_THROW(wrong.plan(), ShapeError);
}

TEST(UpdatesInPlace, AreOutputsUnlessAskedFor) {
  const Graph graph = parse_graph(
      "graph g (float32[4] x, float32[4] a [state]) => (n [state_update a]) {\n"
      "  n = Add(a, x)\n}");
  const auto plan = make_execution_plan(graph, {{4}, {4}}, cpu_kernels());
  EXPECT_EQ(plan->updated_input[0], -1);
  EXPECT_EQ(plan->forward_output_bytes, 16U);
}

}  // namespace
}  // namespace ortrain
