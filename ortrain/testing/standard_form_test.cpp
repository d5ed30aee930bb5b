// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/standard_form.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/base/error.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/text.h"
#include "ortrain/runtime/session.h"
#include "ortrain/testing/harness.h"

namespace ortrain::testing {
namespace {

Graph graph_of(const OpCase& op_case, const std::vector<TensorData>& inputs, size_t outputs) {
  Graph graph;
  graph.name = "one";
  GraphBuilder builder(graph);
  std::vector<ValueId> values;
  for (size_t i = 0; i < inputs.size(); ++i) {
    values.push_back(inputs[i].defined()
                         ? graph.add_input({}, "x" + std::to_string(i), inputs[i].dtype(),
                                           to_shape(inputs[i].dims()))
                         : kNoValue);
  }
  const auto [domain, op] = split_op(op_case.op);
  const std::vector<ValueId> made =
      builder.node(domain, op, values, op_case.attributes, std::vector<bool>(outputs, true));
  for (size_t i = 0; i < outputs; ++i) {
    graph.add_output({.value = made[i], .name = "y" + std::to_string(i)});
  }
  return graph;
}

std::vector<TensorData> run(Graph graph, const std::vector<TensorData>& inputs) {
  std::vector<Dims> dims;
  std::vector<const void*> addresses;
  for (const TensorData& input : inputs) {
    if (!input.defined()) continue;
    dims.push_back(input.dims());
    addresses.push_back(input.data());
  }
  auto session = std::make_shared<Session>(std::move(graph), cpu_kernels());
  RunContext context(session, session->plan(dims));
  std::vector<TensorData> results;
  for (const RunOutput& output : context.forward(addresses)) {
    void* data = nullptr;
    results.push_back(TensorData::allocate(output.spec.dtype, output.spec.dims, &data));
    if (results.back().bytes() > 0) {
      std::memcpy(data, output.block->data(), results.back().bytes());
    }
  }
  return results;
}

double element(const TensorData& data, int64_t i) {
  return dispatch_all(data.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T value = data.data_as<T>()[i];
    if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>) {
      return static_cast<double>(static_cast<float>(value));
    } else {
      return static_cast<double>(value);
    }
  });
}

void expect_close(const TensorData& actual, const TensorData& expected) {
  ASSERT_EQ(actual.dtype(), expected.dtype());
  ASSERT_EQ(actual.dims(), expected.dims());
  for (int64_t i = 0; i < actual.numel(); ++i) {
    const double a = element(actual, i), b = element(expected, i);
    if (std::isnan(a) && std::isnan(b)) continue;
    if (a == b) continue;
    const double tolerance = actual.dtype() == DType::f64   ? 1e-9
                             : actual.dtype() == DType::f32 ? 2e-6
                                                            : 1e-2;
    ASSERT_NEAR(a, b, tolerance * std::max(1.0, std::abs(b))) << "element " << i;
  }
}

// What has no form in some of its uses, by the message.
bool is_known_gap(const std::string& message) {
  for (const char* part : {"draws random numbers", "'offsets' has no form",
                           "label_smoothing with weights", "must be known"}) {
    if (message.find(part) != std::string::npos) return true;
  }
  return false;
}

TEST(StandardForms, EqualTheOperator) {
  std::map<std::string, int> compared;
  for (const OpCase& op_case : all_cases().all()) {
    const auto [domain, op] = split_op(op_case.op);
    if (domain != kOrtrainDomain || op_case.refusal) continue;
    const OpDef& def = op_registry().get(domain, op);
    if (!def.standard_form) continue;
    SCOPED_TRACE(case_name(op_case));
    compared[op] += 0;
    const std::vector<DType> types = types_under_test(op_case);
    const DType type = std::ranges::count(types, DType::f64) > 0 ? DType::f64 : types[0];
    const std::vector<TensorData> inputs = make_inputs(op_case, type);
    for (size_t outputs = op_case.outputs; outputs > 0; --outputs) {
      Graph graph = graph_of(op_case, inputs, outputs);
      const std::vector<TensorData> expected = run(graph, inputs);
      try {
        to_standard_operators(graph);
      } catch (const UnsupportedError& error) {
        if (outputs > 1) continue;  // what is kept for the backward
        EXPECT_TRUE(is_known_gap(error.what())) << error.what();
        break;
      }
      for (NodeId id : graph.order()) EXPECT_EQ(graph.node(id).domain, "");
      // Composites that stand in it for files are read as what they stand for.
      const std::vector<TensorData> actual = run(parse_graph(print_graph(graph)), inputs);
      for (size_t i = 0; i < outputs; ++i) expect_close(actual[i], expected[i]);
      ++compared[op];
      break;
    }
  }
  for (const auto& [op, count] : compared) EXPECT_GT(count, 0) << op;
  EXPECT_GE(compared.size(), 15U);
}

TEST(StandardForms, AreRefusedWhereThereIsNone) {
  Graph graph = parse_graph(
      "graph g (float32[4] x, int64[] s [seed]) => (y) {\n"
      "  y = ortrain::Dropout<ratio = 0.5>(x, s) @\"layer\"\n}");
  try {
    to_standard_operators(graph);
    ADD_FAILURE() << "accepted";
  } catch (const UnsupportedError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("[ortrain::Dropout 'layer']"));
  }
}

}  // namespace
}  // namespace ortrain::testing
