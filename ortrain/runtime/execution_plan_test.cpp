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

// Chains of constants are computed while planning; what only they read does not stay.
TEST(ExecutionPlanFolding, KeepsWhatARunReads) {
  std::string text =
      "graph g (float32[1] x) => (y) {\n"
      "  v0 = ConstantOfShape<value = float32[1] {1}>(int64[1] {262144})\n";
  for (int i = 0; i < 200; ++i) text += str("  v", i + 1, " = Sin(v", i, ")\n");
  text += "  r = ReduceSum<keepdims = 0>(v200)\n  y = Add(x, r)\n}\n";
  Session session(parse_graph(text), cpu_kernels());
  const auto plan = session.plan({{1}});
  EXPECT_EQ(plan->steps.size(), 1U);
  EXPECT_EQ(plan->constant_bytes, sizeof(float));
  size_t held = 0;
  for (const TensorData& constant : plan->constants) held += constant.bytes();
  EXPECT_LT(held, 64U);
}

// Each plan holds a constant as long as its input.
TEST(Session, KeepsPlansByWhatTheyHold) {
  const Graph graph = parse_graph(
      "graph g (float32[n] x) => (y) {\n"
      "  s = Shape(x)\n  c = ConstantOfShape<value = float32[1] {0.5}>(s)\n"
      "  e = Sin(c)\n  y = Add(x, e)\n}");
  const auto plans_of = [&](size_t bytes) {
    Session session(graph, cpu_kernels(), Session::Options{.max_plan_bytes = bytes});
    for (int64_t n = 1; n <= 100; ++n) {
      const auto plan = session.plan({{1000 + n}});
      EXPECT_GE(plan->held_bytes(), plan->constant_bytes);
      EXPECT_EQ(session.latest_plan(), plan);
      EXPECT_TRUE(session.plan_bytes() <= bytes || session.num_plans() == 1);
    }
    bool was_planned = true;
    session.plan({{1100}}, &was_planned);
    EXPECT_FALSE(was_planned);
    return session.num_plans();
  };
  EXPECT_EQ(plans_of(1), 1U);
  EXPECT_EQ(plans_of(size_t{1} << 30), 100U);
  const size_t some = plans_of(100'000);
  EXPECT_GT(some, 5U);
  EXPECT_LT(some, 24U);
}

// Many results that all are wanted: as many as fit stay, the rest is computed in the runs.
TEST(ExecutionPlanFolding, IsBounded) {
  std::string text = "graph g (float32[1] x) => (";
  std::string nodes;
  for (int i = 0; i < 20; ++i) {
    text += str(i > 0 ? ", " : "", "y", i);
    nodes +=
        str("  v", i, " = ConstantOfShape<value = float32[1] {", i, "}>(int64[1] {4194304})\n  s",
            i, " = Sin(v", i, ")\n  y", i, " = Add(s", i, ", x)\n");
  }
  Session session(parse_graph(text + ") {\n" + nodes + "}\n"), cpu_kernels());
  const auto plan = session.plan({{1}});
  EXPECT_LE(plan->constant_bytes, size_t{128} << 20);
  EXPECT_GT(plan->constant_bytes, size_t{96} << 20);
  const float x = 0.25F;
  const void* const inputs[] = {&x};
  const auto outputs = RunContext(std::make_shared<Session>(
                                      parse_graph(text + ") {\n" + nodes + "}\n"), cpu_kernels()),
                                  plan)
                           .forward(inputs);
  for (int i = 0; i < 20; ++i) {
    const auto* data = static_cast<const float*>(outputs[static_cast<size_t>(i)].block->data());
    EXPECT_NEAR(data[4194303], std::sin(static_cast<float>(i)) + 0.25F, 1e-6F);
  }
}

// A sum behind a Reshape is written where the input lies that it becomes, at once.
TEST(ExecutionPlanUpdates, AreWrittenThroughViews) {
  const char* const text = R"(
graph g (float32[8, 4] x, float32[4] s [buffer "s"], float32[4] t [buffer "t"])
    => (y, new_s [buffer_update "s"], new_t [buffer_update "t"]) {
  sum = ReduceSum<keepdims = 1>(x, int64[1] {0})
  new_s = Reshape(sum, int64[1] {4})
  other = ReduceSum<keepdims = 1>(x, int64[1] {1})
  part = Slice(other, int64[1] {2}, int64[1] {6}, int64[1] {0})
  new_t = Reshape(part, int64[1] {4})
  y = Add(sum, t)
}
)";
  const auto session = std::make_shared<Session>(
      parse_graph(text), cpu_kernels(), Session::Options{.plan = {.updates_in_place = true}});
  const auto plan = session->plan({{8, 4}, {4}, {4}});
  size_t copies = 0;
  for (const PlanStep& step : plan->steps) copies += step.kernel == "copy";
  EXPECT_EQ(copies, 1U) << "of what shows a part alone";
  std::vector<float> x(32), s(4, -1), t{1, 2, 3, 4};
  for (size_t i = 0; i < 32; ++i) x[i] = static_cast<float>(i);
  const void* const inputs[] = {x.data(), s.data(), t.data()};
  const auto outputs = RunContext(session, plan).forward(inputs);
  const auto* y = static_cast<const float*>(outputs[0].block->data());
  for (size_t j = 0; j < 4; ++j) {
    const float sum = 8 * static_cast<float>(j) + 4 * 28;
    EXPECT_EQ(s[j], sum);
    EXPECT_EQ(y[j], sum + static_cast<float>(j + 1)) << "the old values are read";
    EXPECT_EQ(t[j], 16 * static_cast<float>(j + 2) + 6);
  }
}

}  // namespace
}  // namespace ortrain
