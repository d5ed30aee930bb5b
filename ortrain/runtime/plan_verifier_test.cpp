// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/plan_verifier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "ortrain/base/error.h"
#include "ortrain/base/flags.h"
#include "ortrain/ir/text.h"
#include "ortrain/runtime/session.h"

namespace ortrain {
namespace {

using ::testing::HasSubstr;
using Kind = Location::Kind;

// Results that take their operands' memory, views, constants, a workspace, a copy into an output,
// and a backward that reads what the forward made.
constexpr const char* kTrained = R"(
  graph g (float32[4, 8] x, float32[4, 8] w, float32[4, 8] dy [gradient y])
    => (y, last, dx [gradient x]) {
    const c = float32[4, 8] {1, ...}
    const d = float32[4, 8] {2, ...}
    h = Mul(x, w)
    e = Exp(h)
    first, last = Split<axis = 0>(e, int64[2] {2, 2})
    f = Add(h, c)
    q = Mul(f, d)
    y = Softmax(q)
    k = CumSum(y, int64 1)
  backward:
    m = Mul(dy, e)
    n = Mul(m, k)
    dx = Add(n, y)
  })";
constexpr const char* kUpdated = R"(
  graph g (float32[4] x, float32[4] w [parameter], float32[4] s [state], float32[4] b [buffer])
    => (y, n [state_update w], m [state_update s], y as to_b [buffer_update b]) {
    m = Mul(s, x)
    n = Sub(w, m)
    y = Exp(x)
  })";

struct Sample {
  explicit Sample(const char* text, bool updates_in_place = false) : graph(parse_graph(text)) {
    for (const GraphInput& input : graph.inputs()) {
      Dims& shape = dims.emplace_back();
      for (const Dim& extent : graph.value(input.value).shape) {
        shape.push_back(*extent.evaluate({}));
      }
    }
    plan = *make_execution_plan(graph, dims, cpu_kernels(), {.updates_in_place = updates_in_place});
  }

  PlanStep& step(const std::string& name) {
    for (PlanStep& step : plan.steps) {
      if (step.node == kNoNode) continue;
      for (const ValueId id : graph.node(step.node).outputs) {
        if (id != kNoValue && graph.value(id).name == name) return step;
      }
    }
    throw InternalError("no step makes " + name);
  }
  Location& operand(const std::string& name, size_t i) {
    return plan.args[step(name).first_arg + i];
  }
  Location& result(const std::string& name) {
    return plan.args[step(name).first_arg + step(name).num_inputs];
  }
  std::string error() const {
    try {
      verify_plan(graph, dims, plan);
    } catch (const InternalError& error) {
      return error.what();
    }
    return "";
  }

  Graph graph;
  std::vector<Dims> dims;
  ExecutionPlan plan;
};

TEST(PlanVerifier, TakesWhatThePlannerMakes) {
  EXPECT_EQ(Sample(kTrained).error(), "");
  EXPECT_EQ(Sample(kUpdated, true).error(), "");
  EXPECT_EQ(Sample(kUpdated).error(), "");
}

TEST(PlanVerifier, LooksAtEachPlanOfTheseTests) { EXPECT_TRUE(flag_is_on("ORTRAIN_VERIFY")); }

TEST(PlanVerifier, FindsPlantedErrors) {
  struct Planted {
    const char* name;
    std::function<void(Sample&)> plant;
    const char* found;
    bool updates = false;
  };
  const auto exchanged = [](Sample& s, const char* one, const char* other) {
    std::swap(s.step(one), s.step(other));
  };
  const std::vector<Planted> all = {
      {"lifetime too short", [](Sample& s) { s.result("f") = s.result("e"); }, "another value"},
      {"another operand", [](Sample& s) { s.operand("m", 1) = s.operand("f", 0); }, "reads 'e'"},
      {"another part of a value", [](Sample& s) { s.plan.views[0].offsets[1] -= 4; }, "'last'"},
      {"a view beyond its source", [](Sample& s) { s.plan.views[0].offsets[1] += 4; },
       "does not lie in"},
      {"order", [&](Sample& s) { exchanged(s, "h", "e"); }, "reads 'h'"},
      {"an operand that its kernel reads", [](Sample& s) { s.step("q").inplace.clear(); },
       "writes over an operand"},
      {"workspace over an operand",
       [](Sample& s) {
         PlanStep& step = s.step("y");
         step.workspace_bytes = 64;
         s.plan.args[step.first_arg + step.num_inputs + step.num_outputs] = s.operand("y", 0);
       },
       "writes over"},
      {"a workspace without a place",
       [](Sample& s) {
         PlanStep& step = s.step("y");
         step.workspace_bytes = 64;
         s.plan.args[step.first_arg + step.num_inputs + step.num_outputs] = {};
       },
       "no place for its workspace"},
      {"an arena that is too small", [](Sample& s) { s.plan.arena_bytes = 64; }, "reach out of"},
      {"not aligned", [](Sample& s) { s.result("h").offset += 4; }, "not aligned"},
      {"a step is missing",
       [](Sample& s) {
         s.plan.steps.erase(s.plan.steps.begin() + (&s.step("dx") - s.plan.steps.data()));
       },
       "is not there at the end"},
      {"a copy is missing",
       [](Sample& s) {
         s.plan.num_forward_steps -=
             std::erase_if(s.plan.steps, [](const PlanStep& step) { return step.node == kNoNode; });
       },
       "is not there at the end"},
      {"a node twice", [](Sample& s) { s.plan.steps.push_back(s.step("k")); }, "runs twice"},
      {"constants exchanged", [](Sample& s) { std::swap(s.operand("f", 1), s.operand("q", 1)); },
       "constant that is another one"},
      {"a constant from its middle", [](Sample& s) { s.operand("f", 1).offset = 64; },
       "reach out of"},
      {"a backward that begins too early", [](Sample& s) { --s.plan.num_forward_steps; },
       "is not there at the end"},
      {"given out too early", [](Sample& s) { s.plan.output_steps[2].end -= 1; }, "touched"},
      {"the gradient's input in the forward",
       [](Sample& s) { s.operand("h", 1) = s.operand("m", 0); }, "reads 'w'"},
      {"written to a constant", [](Sample& s) { s.result("f") = s.operand("q", 1); },
       "writes to a constant"},
      {"written to an input", [](Sample& s) { s.result("k") = s.operand("h", 0); },
       "does not update"},
      {"another input is updated",
       [](Sample& s) { std::swap(s.plan.updated_input[1], s.plan.updated_input[2]); },
       "does not name", true},
      {"two updates of one input",
       [](Sample& s) { s.plan.updated_input[2] = s.plan.updated_input[1]; }, "does not name", true},
      {"updated before it was read", [&](Sample& s) { exchanged(s, "n", "m"); }, "reads 'm'", true},
  };
  for (const Planted& planted : all) {
    SCOPED_TRACE(planted.name);
    Sample sample(planted.updates ? kUpdated : kTrained, planted.updates);
    planted.plant(sample);
    EXPECT_THAT(sample.error(), HasSubstr(planted.found));
    EXPECT_NE(sample.error(), "");
  }
}

// Whatever address of an operand or of a result becomes another one of the plan is found.
TEST(PlanVerifier, FindsEachAddressThatIsExchanged) {
  for (const bool updates : {false, true}) {
    const Sample sample(updates ? kUpdated : kTrained, updates);
    int tried = 0;
    for (const PlanStep& step : sample.plan.steps) {
      for (uint32_t a = 0; a < step.num_inputs + step.num_outputs; ++a) {
        for (const Location& other : sample.plan.args) {
          Sample changed = sample;
          Location& at = changed.plan.args[step.first_arg + a];
          if (at.kind == other.kind && at.index == other.index && at.offset == other.offset)
            continue;
          at = other;
          ++tried;
          EXPECT_NE(changed.error(), "") << "argument " << a << " of " << step.kernel << ", step "
                                         << &step - sample.plan.steps.data();
        }
      }
    }
    EXPECT_GT(tried, 100);
  }
}

}  // namespace
}  // namespace ortrain
