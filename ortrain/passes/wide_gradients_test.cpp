// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/wide_gradients.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/ir/text.h"
#include "ortrain/ir/verifier.h"
#include "ortrain/passes/pass_notes.h"
#include "ortrain/runtime/session.h"

namespace ortrain {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Graph with_backward(const std::string& text) {
  Graph graph = parse_graph(text);
  build_backward(graph, {.output_indices = {0}});
  graph.remove_dead_nodes();
  graph.sort();
  return graph;
}

bool apply(Graph& graph) {
  const bool changed = wide_gradients().run(graph);
  graph.sort();
  graph.remove_dead_nodes();
  verify(graph);
  return changed;
}

// As autocast casts a layer's operands; ONNX's numbers: 1 float32, 10 float16, 16 bfloat16.
std::string layer(const std::string& type, const std::string& product) {
  return "graph g (float32[6, 5] x, float32[4, 5] w [user grad], float32[5, 4] v [user grad],\n"
         "    float32[4] b [user grad]) => (y) {\n"
         "  x2 = Cast <to = " +
         type + "> (x)\n  w2 = Cast <to = " + type +
         "> (w)\n"
         "  v2 = Cast <to = " +
         type + "> (v)\n  b2 = Cast <to = " + type + "> (b)\n" + product +
         "  y = Cast <to = 1> (y2)\n}";
}

const std::string kLinear = "  y2 = ortrain::Linear (x2, w2, b2)\n";
const std::string kConv1d = "  p = Gemm (x2, v2)\n  y2 = Add (p, b2)\n";

// The gradients of an all-different gradient of y.
std::vector<std::vector<float>> gradients(const Graph& graph) {
  auto session = std::make_shared<Session>(graph, cpu_kernels());
  std::vector<std::vector<float>> values;
  std::vector<const void*> addresses;
  for (const size_t size : {30, 20, 20, 4, 24}) {
    std::vector<float>& list = values.emplace_back(size);
    // Exact in 16 bits, as are the sums in float32, but not these in 16.
    for (size_t i = 0; i < size; ++i) list[i] = 0.375f * static_cast<float>((7 * i) % 11) - 1.25f;
  }
  for (const std::vector<float>& list : values) addresses.push_back(list.data());
  RunContext context(session,
                     session->plan({Dims{6, 5}, Dims{4, 5}, Dims{5, 4}, Dims{4}, Dims{6, 4}}));
  context.forward(addresses);
  std::vector<std::vector<float>> result;
  for (const RunOutput& output : context.backward(addresses)) {
    const auto* const data =
        static_cast<const float*>(output.block ? output.block->data() : nullptr);
    result.emplace_back(data, data == nullptr ? data : data + output.spec.numel());
  }
  return result;
}

TEST(WideGradients, GivesSumsOfProductsAndRowsUnrounded) {
  for (const std::string& product : {kLinear, kConv1d}) {
    Graph graph = with_backward(layer("16", product));
    const auto rounded = gradients(graph);
    const auto exact = gradients(with_backward(layer("1", product)));
    const PassNotes notes;
    EXPECT_TRUE(apply(graph));
    EXPECT_EQ(notes.all().size(), 2u);
    EXPECT_THAT(print_graph(graph), HasSubstr("WideReduceSum"));
    EXPECT_THAT(print_graph(graph), HasSubstr("WideLinearWeightGrad"));
    const auto wide = gradients(graph);
    ASSERT_EQ(wide.size(), rounded.size());
    double off_wide = 0, off_rounded = 0;
    for (size_t k = 0; k < wide.size(); ++k) {
      ASSERT_EQ(wide[k].size(), rounded[k].size());
      for (size_t i = 0; i < wide[k].size(); ++i) {
        EXPECT_NEAR(wide[k][i], rounded[k][i], 0.01f * std::abs(rounded[k][i]) + 1e-3f);
        off_wide += std::abs(wide[k][i] - exact[k][i]);
        off_rounded += std::abs(rounded[k][i] - exact[k][i]);
      }
    }
    EXPECT_EQ(off_wide, 0);
    EXPECT_GT(off_rounded, 0);
    EXPECT_FALSE(apply(graph));
  }
}

TEST(WideGradients, LeavesWhatIsRoundedOnPurpose) {
  // Of a forward; read twice; of float32; cast to another type.
  Graph graph = parse_graph(R"(
    graph g (bfloat16[6, 5] x, float32[6, 5] z) => (a, b) {
      const rows = int64[1] {0}
      s = ReduceSum <keepdims = 0> (x, rows)
      a = Cast <to = 1> (s)
      t = ReduceSum <keepdims = 0> (z, rows)
      b = Cast <to = 11> (t)
    })");
  EXPECT_FALSE(apply(graph));
  // Computed again in the backward.
  for (NodeId id : graph.order()) graph.node(id).phase = Phase::backward;
  EXPECT_FALSE(wide_gradients().run(graph));
  // What overflows in float16 is to be seen.
  Graph half = with_backward(layer("10", kLinear));
  EXPECT_FALSE(apply(half));

  Graph shared = with_backward(layer("16", kLinear));
  for (NodeId id : shared.order()) {
    const Node& node = shared.node(id);
    if (node.op == "LinearWeightGrad") {
      shared.add_output({.value = node.outputs[0],
                         .name = "rounded",
                         .role = OutputRole::gradient,
                         .target = "v"});
      break;
    }
  }
  const PassNotes notes;
  EXPECT_TRUE(apply(shared));  // the sum of rows alone
  EXPECT_THAT(print_graph(shared), Not(HasSubstr("WideLinearWeightGrad")));
  ASSERT_EQ(notes.all().size(), 2u);
  EXPECT_EQ(notes.all()[0].taken + notes.all()[1].taken, 1);

  Graph other = with_backward(layer("16",
                                    "  p = Gemm <alpha = 0.5> (x2, v2)\n"
                                    "  y2 = Add (p, b2)\n"));
  apply(other);
  EXPECT_THAT(print_graph(other), Not(HasSubstr("WideLinearWeightGrad")));
  Graph transposed = with_backward(layer("16", "  y2 = Gemm <transB = 1> (x2, w2, b2)\n"));
  EXPECT_TRUE(apply(transposed));
  EXPECT_EQ(gradients(transposed),
            gradients(with_backward(layer("1", "  y2 = Gemm <transB = 1> (x2, w2, b2)\n"))));
}

}  // namespace
}  // namespace ortrain
