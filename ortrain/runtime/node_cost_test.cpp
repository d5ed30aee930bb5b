// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/node_cost.h"

#include <gtest/gtest.h>

#include "ortrain/ir/op_registry.h"

namespace ortrain {
namespace {

NodeCost cost_of(const std::string& domain, const std::string& op, const std::vector<Dims>& inputs,
                 const std::vector<Dims>& outputs, Attributes attributes = {}) {
  const auto specs = [](const std::vector<Dims>& dims) {
    std::vector<TensorSpec> result;
    for (const Dims& d : dims) result.push_back({DType::f32, d});
    return result;
  };
  Node node{.op = op, .domain = domain};
  node.attributes = std::move(attributes);
  return node_cost(
      NodeSpec(op_registry().get(domain, op), node, specs(inputs), specs(outputs), {}));
}

TEST(NodeCost, CountsMatrixProducts) {
  const std::string own(kOrtrainDomain);
  const Dims x{4, 3, 5}, weight{7, 5}, y{4, 3, 7};
  const double product = 2 * 4 * 3 * 5 * 7;
  EXPECT_EQ(cost_of(own, "Linear", {x, weight}, {y}).flops, product);
  EXPECT_EQ(cost_of(own, "LinearInputGrad", {y, weight}, {x}).flops, product);
  EXPECT_EQ(cost_of(own, "LinearWeightGrad", {y, x}, {weight}).flops, product);
  EXPECT_EQ(cost_of("", "MatMul", {x, {5, 7}}, {y}).flops, product);
  EXPECT_EQ(cost_of(own, "FusedMatMul", {{4, 5, 3}, {5, 7}}, {y}, {{"transA", int64_t{1}}}).flops,
            product);
  EXPECT_EQ(cost_of("", "Gemm", {{5, 3}, {5, 7}}, {{3, 7}}, {{"transA", int64_t{1}}}).flops,
            2 * 3 * 5 * 7);
  EXPECT_EQ(cost_of(own, "GroupedMatMul", {{6, 5}, {2, 5, 7}, {2}}, {{6, 7}}).flops, 2 * 6 * 5 * 7);
  EXPECT_EQ(cost_of(own, "GroupedMatMulWeightGrad", {{6, 5}, {6, 7}, {2}}, {{2, 5, 7}}).flops,
            2 * 6 * 5 * 7);
}

TEST(NodeCost, CountsConvolutions) {
  const std::string own(kOrtrainDomain);
  const Dims x{2, 4, 9, 9}, w{6, 2, 3, 3}, y{2, 6, 7, 7};  // two groups
  const double product = 2.0 * (2 * 6 * 7 * 7) * (2 * 3 * 3);
  EXPECT_EQ(cost_of("", "Conv", {x, w}, {y}).flops, product);
  EXPECT_EQ(cost_of(own, "ConvInputGrad", {y, w, {4}}, {x}).flops, product);
  EXPECT_EQ(cost_of(own, "ConvWeightGrad", {y, x, {4}}, {w}).flops, product);
  EXPECT_EQ(cost_of("", "ConvTranspose", {y, w}, {x}).flops, product);
}

TEST(NodeCost, CountsAttentionAndRecurrences) {
  const std::string own(kOrtrainDomain);
  const Dims q{2, 3, 5, 4}, k{2, 3, 7, 4};
  const double product = 2.0 * (2 * 3) * 5 * 7 * 4;
  EXPECT_EQ(cost_of(own, "Attention", {q, k, k}, {q}).flops, 2 * product);
  EXPECT_EQ(cost_of(own, "Attention", {q, k, k}, {q}, {{"is_causal", int64_t{1}}}).flops, product);
  EXPECT_EQ(cost_of(own, "Attention", {{2, 5, 12}, {2, 7, 12}, {2, 7, 12}}, {{2, 5, 12}}).flops,
            2 * product);
  EXPECT_EQ(cost_of(own, "AttentionGrad", {q, q, k, k, q, {2, 3, 5}}, {q, k, k}).flops,
            5 * product);
  const Dims steps{6, 2, 5}, state{2, 3}, y{6, 2, 3};
  for (const auto& [op, gates, states] : {std::tuple{"RNN", 1, 1}, {"GRU", 3, 1}, {"LSTM", 4, 2}}) {
    std::vector<Dims> inputs{steps};
    for (int i = 0; i < states; ++i) inputs.push_back(state);
    inputs.push_back({gates * 3, 5});
    inputs.push_back({gates * 3, 3});
    const double forward = 2.0 * (6 * 2) * gates * 3 * (5 + 3);
    EXPECT_EQ(cost_of(own, op, inputs, {y}).flops, forward) << op;
    inputs.insert(inputs.begin(), y);
    for (int i = 0; i < states; ++i) inputs.insert(inputs.begin() + 1, state);
    EXPECT_EQ(cost_of(own, std::string(op) + "Grad", inputs, {steps}).flops, 2 * forward) << op;
  }
}

TEST(NodeCost, CountsBytesOnceAndOfTablesOnlyWhatIsRead) {
  EXPECT_EQ(cost_of("", "Add", {{8, 4}, {4}}, {{8, 4}}).bytes, 4 * (32 + 4 + 32));
  EXPECT_EQ(cost_of("", "Add", {{8, 4}, {4}}, {{8, 4}}).flops, 0);
  EXPECT_EQ(cost_of("", "Add", {{0, 4}, {4}}, {{0, 4}}).bytes, 16);
  const NodeCost lookup =
      cost_of(std::string(kOrtrainDomain), "Embedding", {{1000, 4}, {3}}, {{3, 4}});
  EXPECT_EQ(lookup.bytes, 4 * (12 + 3 + 12));
}

}  // namespace
}  // namespace ortrain
