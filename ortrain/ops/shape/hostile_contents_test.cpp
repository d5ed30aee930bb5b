// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Graphs of a file in which shape arithmetic, axes and attributes are what no exporter writes.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "ortrain/base/error.h"
#include "ortrain/ir/standard_form.h"
#include "ortrain/ir/text.h"
#include "ortrain/runtime/session.h"
#include "ortrain/testing/harness.h"

namespace ortrain {
namespace {

// A graph of x [s] and c = 1, 2, 3, 4; k is c in the shape of x.
Graph with_open_contents(const std::string& statements) {
  return parse_graph(
      "graph g (float32[s] x) => (y) {\n  const c = int64[4] {1, 2, 3, 4}\n  sh = Shape (x)\n"
      "  k = Reshape (c, sh)\n" +
      statements + "\n}");
}

const std::optional<std::vector<Dim>>& contents(const Graph& graph, const char* name) {
  return graph.value(graph.find_value(name)).known;
}

// Of y, made by `statements` from a and b.
std::optional<std::vector<Dim>> combined(const std::string& a, const std::string& b,
                                         const std::string& node) {
  const Graph graph = parse_graph("graph g () => (y) {\n  const a = " + a + "\n  const b = " + b +
                                  "\n  y = " + node + "\n}");
  return contents(graph, "y");
}

std::vector<int64_t> run(const std::string& text, const std::vector<TensorData>& inputs) {
  auto session = std::make_shared<Session>(parse_graph(text), cpu_kernels());
  std::vector<Dims> dims;
  std::vector<const void*> addresses;
  for (const TensorData& input : inputs) {
    dims.push_back(input.dims());
    addresses.push_back(input.data());
  }
  const auto plan = session->plan(dims);
  RunContext context(session, plan);
  const RunOutput made = context.forward(addresses).at(0);
  const auto* values = static_cast<const int64_t*>(made.block->data());
  return std::vector<int64_t>(values, values + made.spec.numel());
}

TEST(HostileContents, AreUnknownWhereTheirNumberIsOpen) {
  EXPECT_FALSE(contents(with_open_contents("  y = Identity (k)"), "k"));
  EXPECT_FALSE(
      contents(with_open_contents("  const n = int64[9] {0, ...}\n  y = Add (k, n)"), "y"));
  EXPECT_FALSE(contents(with_open_contents("  const from = int64[1] {0}\n"
                                           "  const to = int64[1] {9}\n"
                                           "  y = Slice (k, from, to)"),
                        "y"));
  const Graph range = with_open_contents("  const n = int64[] {9}\n  y = Range (k, n, n)");
  EXPECT_FALSE(range.value(range.find_value("y")).shape[0].is_constant());
}

TEST(HostileContents, AreKnownAgainWhenTheShapesAre) {
  const std::string text =
      "graph g (float32[s] x) => (y) {\n  const c = int64[4] {1, 2, 3, 4}\n  sh = Shape (x)\n"
      "  k = Reshape (c, sh)\n  y = Add (k, k)\n}";
  const TensorData x = TensorData::from_values(DType::f32, {4}, std::vector<float>(4, 0.0f));
  EXPECT_EQ(run(text, {x}), (std::vector<int64_t>{2, 4, 6, 8}));
}

TEST(HostileContents, APartOfASplitIsNotLongerThanTheRest) {
  const char* const nodes =
      "  const big = int64[1] {1000}\n  sp = Concat <axis = 0> (big, sh)\n"
      "  y, rest = Split <axis = 0> (c, sp)";
  EXPECT_THROW(with_open_contents(nodes), ShapeError);
  EXPECT_THROW(with_open_contents("  const sp = int64[] {4}\n  y = Split <axis = 0> (c, sp)"),
               ShapeError);
}

TEST(HostileContents, AxesStandOnce) {
  EXPECT_THROW(parse_graph("graph g (float32[1, 2, 4] x) => (y) {\n"
                           "  const scales = float32[2] {2, 3}\n"
                           "  y = Resize <axes = [2, 2], mode = \"linear\"> (x, _, scales)\n}"),
               ShapeError);
  EXPECT_THROW(parse_graph("graph g (float32[2, 4] x) => (y) {\n"
                           "  const shape = int64[2] {3, 3}\n"
                           "  y = CenterCropPad <axes = [1, -1]> (x, shape)\n}"),
               ShapeError);
}

TEST(HostileContents, AreUnknownBeyond64Bits) {
  const std::string least = "int64[1] {-9223372036854775808}",
                    most = "int64[1] {9223372036854775807}";
  const std::string minus = "int64[1] {-1}", one = "int64[1] {1}", two = "int64[1] {2}";
  EXPECT_FALSE(combined(least, minus, "Div (a, b)"));
  EXPECT_FALSE(combined(least, minus, "Mod (a, b)"));
  EXPECT_FALSE(combined(least, minus, "ortrain::FloorDiv (a, b)"));
  EXPECT_EQ(combined("int64[1] {-7}", minus, "Div (a, b)"), std::vector<Dim>{7});
  EXPECT_FALSE(combined(most, one, "Add (a, b)"));
  EXPECT_FALSE(combined(least, one, "Sub (a, b)"));
  EXPECT_FALSE(combined(most, two, "Mul (a, b)"));
  EXPECT_FALSE(combined(least, one, "Neg (a)"));
  EXPECT_FALSE(combined("int64[2] {9223372036854775807, 1}", "int64[1] {0}",
                        "ReduceSum <keepdims = 1> (a, b)"));
  EXPECT_FALSE(combined("int64[2] {9223372036854775807, 2}", "int64[1] {0}",
                        "ReduceProd <keepdims = 1> (a, b)"));
}

TEST(HostileContents, OfTheWholeRangeCompare) {
  const std::string least = "int64[1] {-9223372036854775808}", one = "int64[1] {1}";
  EXPECT_EQ(combined(least, one, "Less (a, b)"), std::vector<Dim>{1});
  EXPECT_EQ(combined(least, one, "GreaterOrEqual (a, b)"), std::vector<Dim>{0});
  EXPECT_EQ(combined(least, least, "LessOrEqual (a, b)"), std::vector<Dim>{1});
  EXPECT_EQ(combined(least, one, "Equal (a, b)"), std::vector<Dim>{0});
}

TEST(HostileContents, AreUnknownWhereTheTypeWraps) {
  EXPECT_FALSE(combined("int32[1] {2147483647}", "int32[1] {1}", "Add (a, b)"));
  EXPECT_FALSE(combined("int32[1] {-2147483648}", "int32[1] {-1}", "Div (a, b)"));
  EXPECT_FALSE(combined("int64[1] {300}", "int64[1] {0}", "Cast <to = 2> (a)"));
  EXPECT_FALSE(combined("int64[1] {-1}", "int64[1] {0}", "Cast <to = 13> (a)"));
  EXPECT_EQ(combined("int64[1] {200}", "int64[1] {0}", "Cast <to = 2> (a)"), std::vector<Dim>{200});
  EXPECT_EQ(combined("int64[1] {300}", "int64[1] {0}", "Cast <to = 9> (a)"), std::vector<Dim>{1});
  const Graph graph = parse_graph(
      "graph g () => (y) {\n  const a = int64[1] {200}\n  b = Cast <to = 2> (a)\n"
      "  y = Add (b, b)\n}");
  EXPECT_FALSE(contents(graph, "y"));
}

TEST(HostileContents, OfManyPartsAreNotGathered) {
  std::string parts;
  for (int i = 0; i < 3; ++i) parts += i == 0 ? "a" : ", a";
  EXPECT_FALSE(combined("int64[30] {1, ...}", "int64[1] {0}", "Concat <axis = 0> (" + parts + ")"));
  EXPECT_TRUE(combined("int64[30] {1, ...}", "int64[1] {0}", "Concat <axis = 0> (a, a)"));
}

TEST(HostileContents, SlicesEndWhereTheirBoundSays) {
  const auto length = [](const std::string& from, const std::string& to, const std::string& step) {
    const Graph graph = parse_graph(
        "graph g (float32[s] x) => (y) {\n  const from = int64[1] {" + from +
        "}\n  const to = int64[1] {" + to + "}\n  const axis = int64[1] {0}\n" +
        "  const step = int64[1] {" + step + "}\n  y = Slice (x, from, to, axis, step)\n}");
    Dims dims{5};
    const auto plan = std::make_shared<Session>(graph, cpu_kernels())->plan({dims});
    return std::pair(graph.value(graph.find_value("y")).shape[0].str(), plan->outputs[0].numel());
  };
  using Length = std::pair<std::string, int64_t>;
  EXPECT_EQ(length("0", "2147483647", "1"), Length("s", 5));
  EXPECT_EQ(length("0", "140737488355328", "1"), Length("s", 5));
  EXPECT_EQ(length("0", "3000000000", "1"), Length("s", 5));
  EXPECT_EQ(length("-1", "-9223372036854775808", "-1"), Length("s", 5));
  EXPECT_EQ(length("-1", "-2147483647", "-1"), Length("s", 5));
  EXPECT_EQ(length("-1", "-9223372036854775808", "-9223372036854775808").second, 1);
  EXPECT_EQ(length("0", "9223372036854775807", "9223372036854775807").second, 1);
}

TEST(HostileContents, AttributesThatNoTypeHolds) {
  EXPECT_THROW(parse_graph("graph g (float32[2, 2] x) => (y) {\n"
                           "  y = EyeLike <dtype = 4294967297> (x)\n}"),
               UnsupportedError);
  EXPECT_THROW(parse_graph("graph g (float32[1, 1, 2, 4] q) => (y, p) {\n"
                           "  y, _, _, p = Attention <softmax_precision = 257> (q, q, q)\n}"),
               InvalidModelError);
  EXPECT_THROW(
      parse_graph(
          "graph g (float32[2, 2] x, int64[2] n) => (y) {\n"
          "  y = ReverseSequence <batch_axis = 9223372036854775807, time_axis = 1> (x, n)\n}"),
      InvalidModelError);
  EXPECT_THROW(parse_graph("graph g (float32[1, 1099511627776, 0, 0] x) => (y) {\n"
                           "  y = SpaceToDepth <blocksize = 16384> (x)\n}"),
               ShapeError);
  EXPECT_THROW(parse_graph("graph g (float32[1, 1048576, 0] q) => (y) {\n"
                           "  y = ortrain::Attention <q_num_heads = 1099511627776> (q, q, q)\n}"),
               ShapeError);
  EXPECT_THROW(parse_graph("graph g (float32[1, 1, 4] x, float32[1, 1, 2] w) => (y) {\n"
                           "  y = ConvTranspose <output_shape = [9223372036854775807]> (x, w)\n}"),
               ShapeError);
}

TEST(HostileContents, StandardFormsAreNotWrittenOutWithoutEnd) {
  Graph pool = parse_graph(
      "graph g (float32[1, 1, 4] x) => (y) {\n"
      "  y = ortrain::AdaptiveAveragePool <output_size = [100000]> (x)\n}");
  EXPECT_THROW(to_standard_operators(pool), UnsupportedError);
  Graph products = parse_graph(
      "graph g (float32[2, 1] x, float32[100000, 1, 1] w, int64[100000] n) => (y) {\n"
      "  y = ortrain::GroupedMatMul (x, w, n)\n}");
  EXPECT_THROW(to_standard_operators(products), UnsupportedError);
  Graph bins = parse_graph(
      "graph g (float32[2] x) => (y) {\n"
      "  y = ortrain::BinCount <bins = 100000000000, max = 1.0> (x)\n}");
  to_standard_operators(bins);
  EXPECT_LT(bins.order().size(), 64u);
}

TEST(HostileContents, OfLongExpressionsAreNotKept) {
  std::string extents;
  for (int i = 0; i < 40; ++i) {
    extents += (i == 0 ? "s" : ", s") + std::to_string(i) + std::string(1000, '_');
  }
  const Graph graph =
      parse_graph("graph g (float32[" + extents + "] x) => (y) {\n  y = Shape (x)\n}");
  EXPECT_FALSE(contents(graph, "y"));
}

TEST(HostileContents, IntegersWrapWhereTheyAreComputed) {
  const auto matrix = [](int64_t value) {
    return TensorData::from_values(DType::i64, {1, 1}, std::vector<int64_t>{value});
  };
  EXPECT_EQ(run("graph g (int64[1, 1] a, int64[1, 1] b) => (y) {\n  y = MatMul (a, b)\n}",
                {matrix(INT64_MAX), matrix(2)}),
            std::vector<int64_t>{-2});
  EXPECT_EQ(run("graph g (int64[1, 1] a) => (y) {\n  y = ReduceLogSum (a)\n}", {matrix(0)}),
            std::vector<int64_t>{INT64_MIN});
  EXPECT_TRUE(std::isinf(TensorData::scalar(DType::f32, 1e300).to_double()));
}

TEST(HostileContents, AttentionWithoutKeyHeadsHasThoseOfTheQueries) {
  Graph graph = parse_graph(
      "graph g (float32[1, 2, 4] q) => (y) {\n"
      "  y = ortrain::Attention <q_num_heads = 2, kv_num_heads = -1> (q, q, q)\n}");
  EXPECT_NO_THROW(to_standard_operators(graph));
}

TEST(HostileContents, BoundsOfKnownAxesAreTheNumbersThatTheyAre) {
  const auto shape = [](const std::string& begin, const std::string& end) {
    const Graph graph =
        parse_graph("graph g (int8[3000000000] x) => (y) {\n  y = Slice(x, int64[1] {" + begin +
                    "}, int64[1] {" + end + "})\n}");
    return shape_str(graph.value(graph.outputs()[0].value).shape);
  };
  EXPECT_EQ(shape("0", "2147483647"), "[2147483647]");
  EXPECT_EQ(shape("2147483647", "9223372036854775807"), "[852516353]");
  EXPECT_EQ(shape("-9223372036854775808", "4294967295"), "[3000000000]");
}

}  // namespace
}  // namespace ortrain
