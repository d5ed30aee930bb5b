// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Graphs whose sizes leave the address space, or that have no elements but long axes.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/error.h"
#include "ortrain/ir/text.h"
#include "ortrain/runtime/session.h"

namespace ortrain {
namespace {

// Plans and runs a graph of float32 inputs without elements.
void run(const std::string& text, const std::vector<Dims>& dims) {
  auto session = std::make_shared<Session>(parse_graph(text), cpu_kernels());
  const auto plan = session->plan(dims);
  RunContext context(session, plan);
  float nothing = 0;
  const std::vector<const void*> addresses(dims.size(), &nothing);
  context.forward(addresses);
}

TEST(LargeExtents, AShapeBeyondTheAddressSpaceNamesTheInputOrTheLayer) {
  const std::string text = "graph g (float32[n, m] x) => (y) {\n  y = Relu(x)\n}";
  try {
    run(text, {{int64_t{1} << 61, 0}});
    FAIL() << "it has been taken";
  } catch (const ShapeError& error) {
    EXPECT_NE(std::string(error.what()).find("input 'x'"), std::string::npos) << error.what();
  }
  const std::string outer =
      "graph g (float32[n, k] x, float32[k, m] y) => (z) {\n  z = MatMul(x, y)\n}";
  try {
    run(outer, {{int64_t{1} << 40, 0}, {0, int64_t{1} << 40}});
    FAIL() << "it has been taken";
  } catch (const ShapeError& error) {
    EXPECT_NE(std::string(error.what()).find("MatMul"), std::string::npos) << error.what();
  }
}

TEST(LargeExtents, AnArenaBeyondTheAddressSpaceIsRefused) {
  // Each value would fit by itself.
  std::string chain = "graph g (float32[n, 1] x, float32[1, m] y) => (z) {\n  a0 = Add(x, y)\n";
  for (int i = 1; i < 4; ++i) {
    chain += "  a" + std::to_string(i) + " = Softmax(a" + std::to_string(i - 1) + ")\n";
  }
  chain += "  b = Add(a0, a1)\n  c = Add(b, a2)\n  z = Add(c, a3)\n}";
  auto session = std::make_shared<Session>(parse_graph(chain), cpu_kernels());
  EXPECT_THROW(session->plan({{int64_t{1} << 22, 1}, {1, int64_t{1} << 23}}), ShapeError);
}

TEST(LargeExtents, ManyProductsCostNoListOfThem) {
  const Graph graph = parse_graph(
      "graph g (float32[n, 2, m, 8] x, float32[n, 2, 8, 3] y) => (z) {\n  z = MatMul(x, y)\n}");
  const int64_t far = int64_t{1} << 36;
  const auto plan = make_execution_plan(graph, {{far, 2, 1, 8}, {far, 2, 8, 3}}, cpu_kernels(),
                                        {.sizes_only = true, .memory_limit = kMostBytes});
  EXPECT_EQ(plan->forward_output_bytes, static_cast<size_t>(far) * 24);
}

TEST(LargeExtents, NodesBeyondTheMemoryAreRefusedBeforeTheirKernelsAreMade) {
  // Pools keep tables as long as an axis.
  const Graph graph = parse_graph(
      "graph g (float32[1, 1, n] x) => (y) {\n"
      "  y = AveragePool<kernel_shape = [2], pads = [1, 0]>(x)\n}");
  EXPECT_THROW(make_execution_plan(graph, {{1, 1, int64_t{1} << 43}}, cpu_kernels()),
               OutOfMemoryError);
  EXPECT_THROW(make_execution_plan(graph, {{1, 1, 1000}}, cpu_kernels(), {.memory_limit = 4000}),
               OutOfMemoryError);
  EXPECT_NO_THROW(
      make_execution_plan(graph, {{1, 1, 1000}}, cpu_kernels(), {.memory_limit = 8000}));
}

class WithoutElements : public testing::TestWithParam<const char*> {};

TEST_P(WithoutElements, LongAxesCostNothing) {
  const std::string text =
      std::string("graph g (float32[n, m, k] x) => (y) {\n  y = ") + GetParam() + "\n}";
  const int64_t far = int64_t{1} << 40;
  run(text, {{far, 3, 0}});
  run(text, {{far, 0, 3}});
  run(text, {{0, far, 3}});
  run(text, {{3, 0, far}});
}

INSTANTIATE_TEST_SUITE_P(Operators, WithoutElements,
                         testing::Values("Softmax(x)", "LogSoftmax(x)", "Relu(x)", "Gelu(x)",
                                         "Add(x, x)", "Transpose(x)", "Concat<axis = 1>(x, x)"));

TEST(LargeExtents, NothingGoesAlongLongAxesWithoutElements) {
  const int64_t far = int64_t{1} << 40;
  const std::string sum = "graph g (float32[n, 3, m] x) => (y) {\n  y = ReduceSum(x)\n}";
  EXPECT_THROW(run(sum, {{far, 3, 0}}), UnsupportedError);
  EXPECT_NO_THROW(run(sum, {{1 << 20, 3, 0}}));
  // The logits of an empty batch.
  EXPECT_NO_THROW(run("graph g (float32[n, 8192, 152064] x) => (y) {\n  y = ReduceSum(x)\n}",
                      {{0, 8192, 152064}}));
  EXPECT_THROW(run("graph g () => (y) {\n  const x = float32[1099511627776, 0] {}\n"
                   "  y = ReduceSum(x)\n}",
                   {}),
               UnsupportedError);
}

TEST(LargeExtents, AShapeOfLengthZeroThatArrivesAtRunTimeIsAScalars) {
  const std::string text =
      "graph g (float32[n] x, int64[0] shape) => (z) {\n  y = Reshape(x, shape)\n  z = Relu(y)\n}";
  EXPECT_NO_THROW(run(text, {{1}, {0}}));
  EXPECT_THROW(run(text, {{0}, {0}}), ShapeError);
  EXPECT_THROW(run(text, {{6}, {0}}), ShapeError);
}

// A graph of Resize with scales for an input [1, n].
std::string resize(const std::string& scale, const std::string& attributes) {
  return "graph g (float32[1, n] x) => (y) {\n  const s = float32[2] {1, " + scale +
         "}\n  y = Resize <" + attributes + "> (x, _, s)\n}";
}

TEST(LargeExtents, TablesOfResizeAreBounded) {
  for (const char* attributes : {"mode = \"nearest\"", "mode = \"linear\"", "mode = \"cubic\""}) {
    EXPECT_THROW(run(resize("1e9", attributes), {{1, 1}}), UnsupportedError) << attributes;
    EXPECT_THROW(run(resize("1e30", attributes), {{1, 1}}), ShapeError) << attributes;
    EXPECT_NO_THROW(run(resize("1e9", attributes), {{1, 0}})) << attributes;
  }
  EXPECT_THROW(run(resize("1e-8", "mode = \"linear\", antialias = 1"), {{1, 1 << 27}}),
               UnsupportedError);
}

}  // namespace
}  // namespace ortrain
