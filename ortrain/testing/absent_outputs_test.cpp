// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Each case of each operator with several results, of which some are absent: the others are the
// same, as they are read, behind the passes, and with gradients.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/base/error.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/text.h"
#include "ortrain/ir/verifier.h"
#include "ortrain/passes/pipeline.h"
#include "ortrain/runtime/session.h"
#include "ortrain/testing/harness.h"

namespace ortrain::testing {
namespace {

using ::testing::HasSubstr;

enum class Stage : uint8_t { read, simplified, trained };

// The case's graph, of whose outputs only those in `kept` are made.
Graph graph_with(const OpCase& op_case, const std::vector<TensorData>& inputs,
                 const std::vector<bool>& kept) {
  Graph graph = graph_of_case(op_case, inputs,
                              [](const TensorData& x) { return !kFloatTypes.contains(x.dtype()); });
  const NodeId last = graph.order().back();
  std::vector<GraphOutput> outputs;
  for (const GraphOutput& output : graph.outputs()) {
    const std::vector<ValueId>& made = graph.node(last).outputs;
    const auto at = std::ranges::find(made, output.value) - made.begin();
    if (kept[static_cast<size_t>(at)]) outputs.push_back(output);
  }
  for (size_t i = 0; i < kept.size(); ++i) {
    ValueId& output = graph.node(last).outputs[i];
    if (kept[i] || output == kNoValue) continue;
    graph.value(output).producer = kNoNode;
    output = kNoValue;
  }
  graph.outputs() = outputs;
  return graph;
}

// Makes the backward of all results that can have one; false where there is none.
bool differentiate(Graph& graph) {
  BackwardOptions options;
  const std::vector<bool> wanted = differentiable_outputs(graph);
  for (size_t k = 0; k < wanted.size(); ++k) {
    if (wanted[k]) options.output_indices.push_back(k);
  }
  if (options.output_indices.empty()) return false;
  build_backward(graph, options);
  graph.remove_dead_nodes();
  graph.sort();
  return true;
}

// The forward's results by name. Nullopt where the engine refuses.
std::optional<std::map<std::string, std::string>> run(Graph graph,
                                                      const std::vector<TensorData>& inputs,
                                                      Stage stage) {
  std::map<std::string, std::string> results;
  try {
    verify(graph);
    if (stage != Stage::read) run_pipeline(graph, "simplify");
    if (stage == Stage::trained && !differentiate(graph)) return std::nullopt;
    if (stage == Stage::trained) run_pipeline(graph, "fuse");
    verify(graph);
    std::vector<Dims> dims;
    std::vector<const void*> forward;
    for (const TensorData& input : inputs) {
      if (!input.defined() || !kFloatTypes.contains(input.dtype())) continue;
      dims.push_back(input.dims());
      forward.push_back(input.data());
    }
    dims.resize(graph.inputs().size());
    auto session = std::make_shared<Session>(std::move(graph), cpu_kernels());
    const auto plan = session->plan(dims);
    std::vector<TensorData> gradients;
    std::vector<const void*> backward;
    for (size_t i = 0; i < plan->inputs.size(); ++i) {
      const bool is_gradient = session->graph().inputs()[i].role == InputRole::gradient;
      if (is_gradient) {
        void* data = nullptr;
        gradients.push_back(
            TensorData::allocate(plan->inputs[i].dtype, plan->inputs[i].dims, &data));
        std::memset(data, 0, gradients.back().bytes());
      }
      if (i >= forward.size()) forward.push_back(nullptr);
      backward.push_back(is_gradient ? gradients.back().data() : nullptr);
    }
    RunContext context(session, plan);
    const std::vector<RunOutput> outputs = context.forward(forward);
    for (size_t k = 0; k < outputs.size(); ++k) {
      const GraphOutput& output = session->graph().outputs()[k];
      if (outputs[k].block == nullptr || output.role != OutputRole::user) continue;
      results[output.name] =
          std::string(static_cast<const char*>(outputs[k].block->data()), outputs[k].spec.bytes());
    }
    if (context.can_run_backward()) context.backward(backward);
  } catch (const InternalError&) {
    throw;
  } catch (const Error&) {
    return std::nullopt;
  }
  return results;
}

Arity arity_of(const OpCase& op_case, size_t output) {
  const auto [domain, op] = split_op(op_case.op);
  return op_registry().get(domain, op).formal_output(output)->arity;
}

class OpAbsentOutputs : public ::testing::TestWithParam<OpCase> {};

TEST_P(OpAbsentOutputs, LeaveTheOthersAsTheyAre) {
  const OpCase& op_case = GetParam();
  const DType type = types_under_test(op_case).front();
  const std::vector<TensorData> inputs = make_inputs(op_case, type);
  const auto count = static_cast<size_t>(op_case.outputs);
  for (const Stage stage : {Stage::read, Stage::simplified, Stage::trained}) {
    const auto all =
        run(graph_with(op_case, inputs, std::vector<bool>(count, true)), inputs, stage);
    for (size_t i = 0; i < 2 * count; ++i) {
      // All but one, or one alone.
      std::vector<bool> kept(count, i < count);
      kept[i % count] = !kept[i % count];
      const Graph graph = graph_with(op_case, inputs, kept);
      const auto misses = [&](Arity arity) {
        bool found = false;
        for (size_t k = 0; k < count; ++k) found |= !kept[k] && arity_of(op_case, k) == arity;
        return found;
      };
      if (misses(Arity::single)) {
        EXPECT_THROW(verify(graph), Error) << print_graph(graph);
        continue;
      }
      if (graph.outputs().empty()) continue;
      SCOPED_TRACE(str("stage ", static_cast<int>(stage), "\n", print_graph(graph)));
      const auto some = run(graph, inputs, stage);
      if (!all) continue;
      // Updates of many tensors want all of them.
      ASSERT_TRUE(some || stage == Stage::trained || misses(Arity::variadic));
      if (!some) continue;
      for (const auto& [name, bytes] : *some) EXPECT_EQ(bytes, all->at(name)) << name;
    }
  }
}

std::string name_of_test(const ::testing::TestParamInfo<OpCase>& info) {
  return test_name(info.param, info.index);
}

std::vector<OpCase> cases_with_several_results() {
  std::vector<OpCase> cases;
  for (const OpCase& op_case : all_cases().all()) {
    if (!op_case.refusal && op_case.outputs > 1) cases.push_back(op_case);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, OpAbsentOutputs, ::testing::ValuesIn(cases_with_several_results()),
                         name_of_test);

TEST(AbsentOutputs, ANodeWithoutResultsIsLeftOut) {
  const Graph graph = parse_graph(
      "graph g (float32[2, 3] x, float32[3] w) => (y) {\n"
      "  _ = Identity(x)\n  _ = Cast<to = 11>(x)\n  _, _ = Dropout(x)\n"
      "  y = LayerNormalization(x, w)\n}");
  EXPECT_EQ(graph.order().size(), 1u);
}

TEST(AbsentOutputs, AGraphRefusesThem) {
  Graph graph = parse_graph("graph g (float32[2] x) => (y) { y = Relu(x) }");
  EXPECT_THROW(graph.value(kNoValue), InternalError);
  EXPECT_THROW(graph.value(2), InternalError);
  EXPECT_THROW(graph.node(kNoNode), InternalError);
  EXPECT_THROW(graph.node(1), InternalError);
  EXPECT_THROW(graph.replace_uses(kNoValue, 0), InternalError);
  graph.outputs()[0].value = 0;
  graph.node(0).outputs[0] = kNoValue;
  try {
    verify(graph);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("output 'Y' is required"));
  }
}

TEST(AbsentOutputs, ARequiredOneIsMadeWhereAFileLeavesItOut) {
  const Graph graph = parse_graph(
      "graph g (float32[1, 2, 3, 4] x) => (logsumexp) {\n"
      "  _, logsumexp = ortrain::Attention(x, x, x)\n}");
  const Node& node = graph.node(graph.order()[0]);
  EXPECT_NE(node.outputs[0], kNoValue);
  EXPECT_EQ(graph.outputs()[0].value, node.outputs[1]);
  auto session = std::make_shared<Session>(graph, cpu_kernels());
  const std::vector<float> x(24, 1.0f);
  RunContext context(session, session->plan({{1, 2, 3, 4}}));
  const std::vector<RunOutput> outputs = context.forward({{x.data()}});
  EXPECT_NEAR(static_cast<const float*>(outputs[0].block->data())[0], 2 + std::log(3.0), 1e-5);
}

}  // namespace
}  // namespace ortrain::testing
