// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Every gradient case of the data-moving families once more, with all extents symbols while the
// graph and its gradient are built: the plan must come to the same numbers.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/runtime/kernel_registry.h"
#include "ortrain/runtime/session.h"
#include "ortrain/testing/harness.h"

namespace ortrain::testing {
namespace {

const std::set<std::string> kOps = {
    "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand", "Tile", "ortrain::SumToShape",
    "Transpose", "Trilu", "Concat", "Split", "Slice", "ortrain::SliceGrad", "Pad",
    "ortrain::PadGrad", "Gather", "ortrain::GatherGrad", "GatherElements", "ScatterElements",
    "GatherND", "ortrain::GatherNDGrad", "ScatterND", "ReduceSum", "ReduceMean", "ReduceMax",
    "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceProd", "ReduceLogSum",
    "ReduceLogSumExp", "CumSum", "TopK"};

std::vector<OpCase> symbolic_cases() {
  std::vector<OpCase> result;
  for (const OpCase& op_case : all_cases().all()) {
    if (kOps.contains(op_case.op) && has_gradient_check(op_case)) result.push_back(op_case);
  }
  return result;
}

using Gradients = std::map<std::string, std::vector<double>>;

std::vector<double> doubles(const void* data, int64_t count) {
  const auto* values = static_cast<const double*>(data);
  return std::vector<double>(values, values + count);
}

// Outputs "y0", ... and the gradients of the float64 inputs for an incoming gradient of ones.
Gradients run(const OpCase& op_case, const std::vector<TensorData>& inputs, bool symbolic) {
  Graph graph;
  GraphBuilder builder(graph);
  std::vector<ValueId> values;
  std::vector<Dims> dims;
  std::vector<const void*> addresses;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) {
      values.push_back(kNoValue);
      continue;
    }
    if (inputs[i].dtype() != DType::f64) {
      values.push_back(graph.add_constant(inputs[i]));
      continue;
    }
    Shape shape = to_shape(inputs[i].dims());
    for (size_t k = 0; symbolic && k < shape.size(); ++k) {
      shape[k] = Dim::symbol(str("s", i, "_", k));
    }
    values.push_back(graph.add_input({.role = InputRole::user, .requires_grad = true}, str("x", i),
                                     DType::f64, shape));
    dims.push_back(inputs[i].dims());
    addresses.push_back(inputs[i].data());
  }
  const size_t colons = op_case.op.find("::");
  const bool ours = colons != std::string::npos;
  const std::vector<ValueId> outputs = builder.node(
      ours ? kOrtrainDomain : "", ours ? op_case.op.substr(colons + 2) : op_case.op, values,
      op_case.attributes, std::vector<bool>(op_case.outputs, true));
  for (size_t i = 0; i < outputs.size(); ++i) {
    graph.add_output({.value = outputs[i], .name = str("y", i), .role = OutputRole::user});
  }
  build_backward(graph, {.output_indices = op_case.gradient_outputs});
  graph.remove_dead_nodes();
  graph.sort();
  dims.resize(graph.inputs().size());
  addresses.resize(graph.inputs().size());

  auto session = std::make_shared<Session>(graph, cpu_kernels());
  const auto plan = session->plan(dims);
  std::vector<double> ones;
  for (const TensorSpec& input : plan->inputs) {
    ones.resize(std::max(ones.size(), static_cast<size_t>(input.numel())), 1.0);
  }
  std::vector<const void*> gradient_addresses(addresses.size(), nullptr);
  for (size_t i = 0; i < graph.inputs().size(); ++i) {
    if (graph.inputs()[i].role == InputRole::gradient) gradient_addresses[i] = ones.data();
  }
  RunContext context(session, plan);
  const std::vector<RunOutput> forward = context.forward(addresses);
  Gradients result;
  for (size_t k = 0; k < forward.size(); ++k) {
    if (graph.outputs()[k].role != OutputRole::user) continue;
    if (forward[k].spec.dtype != DType::f64) continue;
    result[graph.outputs()[k].name] = doubles(forward[k].block->data(), forward[k].spec.numel());
  }
  if (!context.can_run_backward()) return result;
  const std::vector<RunOutput> gradients = context.backward(gradient_addresses);
  for (size_t k = 0; k < gradients.size(); ++k) {
    if (graph.outputs()[k].role != OutputRole::gradient) continue;
    result["d" + graph.outputs()[k].target] =
        doubles(gradients[k].block->data(), gradients[k].spec.numel());
  }
  return result;
}

class SymbolicShapes : public ::testing::TestWithParam<OpCase> {};

TEST_P(SymbolicShapes, GiveTheGradientsOfConcreteOnes) {
  const std::vector<TensorData> inputs = make_inputs(GetParam(), DType::f64, 3);
  Gradients symbolic;
  try {
    symbolic = run(GetParam(), inputs, true);
  } catch (const UnsupportedError& error) {
    // The rank of Squeeze without axes cannot be known.
    ASSERT_EQ(GetParam().op, "Squeeze") << error.what();
    return;
  }
  const Gradients concrete = run(GetParam(), inputs, false);
  ASSERT_EQ(symbolic.size(), concrete.size());
  for (const auto& [name, expected] : concrete) {
    ASSERT_TRUE(symbolic.contains(name)) << name;
    const std::vector<double>& actual = symbolic.at(name);
    ASSERT_EQ(actual.size(), expected.size()) << name;
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(actual[i], expected[i], 1e-12 * std::max(1.0, std::abs(expected[i])))
          << name << "[" << i << "]";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DataOps, SymbolicShapes, ::testing::ValuesIn(symbolic_cases()),
                         [](const ::testing::TestParamInfo<OpCase>& info) {
                           std::string name;
                           for (char c : case_name(info.param)) {
                             name += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
                           }
                           return name + "_" + std::to_string(info.index);
                         });

}  // namespace
}  // namespace ortrain::testing
