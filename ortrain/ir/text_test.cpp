// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "ortrain/base/error.h"
#include "ortrain/base/half.h"
#include "ortrain/ir/graph_compare.h"
#include "ortrain/ir/sample_registry_test.h"

namespace ortrain {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

Graph parse(std::string_view text) { return parse_graph(text, sample_registry()); }

void expect_round_trip(const Graph& graph) {
  const std::string text = print_graph(graph);
  SCOPED_TRACE(text);
  const Graph again = parse(text);
  EXPECT_EQ(first_difference(graph, again), "");
  EXPECT_EQ(print_graph(again), text);
}

template <typename ErrorType>
std::string message_of(std::string_view text) {
  try {
    parse(text);
  } catch (const ErrorType& error) {
    return error.what();
  }
  ADD_FAILURE() << "not refused: " << text;
  return "";
}

constexpr std::string_view kModel = R"(
# roles, phases, layers
graph "my model" (float32[b, 2*s + 1] x, float32[4] w [parameter "fc.weight" grad],
                  float32[4] m [buffer], int64 s [seed], float32[b, 2*s + 1] dy [gradient y])
    => (y, m2 as running [buffer_update m], dx as "x grad" [gradient x], y as y2) {
  const c = float32 {0.5}
  y, _ = Dropout <seed = 3> (x, c) @ encoder.layer.0/Dropout
  m2 = Add(m, w) @"odd name"
backward:
  d = Softmax(dy)
forward:
  unused = Identity(y)
backward:
  dx = Dropout(d, _, bool true)
}
)";

TEST(text, looks_like_this) {
  const Graph graph = parse(R"(graph mlp(float32[b,4]x,float32[4]w[parameter fc.bias grad])=>(y){
    h = Add(x, w) @fc/Add
    y = Softmax<axis=1>(h) })");
  EXPECT_EQ(print_graph(graph), R"(graph mlp (float32[b, 4] x,
       float32[4] w [parameter fc.bias grad])
    => (y) {
  h = Add (x, w) @fc/Add  # float32[b, 4]
  y = Softmax <axis = 1> (h)  # float32[b, 4]
}
)");
}

TEST(text, reads_roles_phases_and_layers) {
  const Graph graph = parse(kModel);
  EXPECT_EQ(graph.name, "my model");
  ASSERT_EQ(graph.inputs().size(), 5u);
  EXPECT_EQ(graph.inputs()[0].role, InputRole::user);
  EXPECT_FALSE(graph.inputs()[0].requires_grad);
  EXPECT_EQ(shape_str(graph.value(graph.inputs()[0].value).shape), "[b, 2*s + 1]");
  EXPECT_EQ(graph.inputs()[1].role, InputRole::parameter);
  EXPECT_EQ(graph.inputs()[1].target, "fc.weight");
  EXPECT_TRUE(graph.inputs()[1].requires_grad);
  EXPECT_EQ(graph.inputs()[2].target, "m");
  EXPECT_EQ(graph.inputs()[3].role, InputRole::seed);
  EXPECT_EQ(graph.inputs()[4].target, "y");
  ASSERT_EQ(graph.outputs().size(), 4u);
  EXPECT_EQ(graph.outputs()[1].name, "running");
  EXPECT_EQ(graph.outputs()[1].role, OutputRole::buffer_update);
  EXPECT_EQ(graph.outputs()[2].name, "x grad");
  EXPECT_EQ(graph.outputs()[3].value, graph.outputs()[0].value);
  ASSERT_EQ(graph.order().size(), 5u);
  const Node& dropout = graph.node(graph.order()[0]);
  EXPECT_EQ(dropout.name, "encoder.layer.0/Dropout");
  EXPECT_EQ(dropout.outputs[1], kNoValue);
  EXPECT_EQ(graph.node(graph.order()[1]).name, "odd name");
  EXPECT_EQ(graph.node(graph.order()[2]).phase, Phase::backward);
  EXPECT_EQ(graph.node(graph.order()[3]).phase, Phase::forward);
  const Node& last = graph.node(graph.order()[4]);
  EXPECT_EQ(last.phase, Phase::backward);
  EXPECT_EQ(last.inputs[1], kNoValue);
  EXPECT_EQ(graph.value(last.inputs[2]).constant.dtype(), DType::boolean);
}

TEST(text, infers_types_and_shapes) {
  const Graph graph = parse(R"(graph (float32[b, 1] x, float32[128] w) => (y, z, n) {
    y = Add(x, w)
    t = Shape(y)
    z = Reshape(y, t)
    n = NonZero(y)
  })");
  const Value& y = graph.value(graph.find_value("y"));
  EXPECT_EQ(y.dtype, DType::f32);
  EXPECT_EQ(shape_str(y.shape), "[b, 128]");
  EXPECT_EQ(shape_str(graph.value(graph.find_value("z")).shape), "[b, 128]");
  expect_round_trip(graph);
}

TEST(text, round_trip_keeps_everything) { expect_round_trip(parse(kModel)); }

TEST(text, round_trip_of_every_attribute_kind) {
  const Graph graph = parse(R"(graph g (float32[2] x) => (y) {
    y = ortrain::Everything <i = -9223372036854775808, f = 0.1, s = "a\"b\\\n\t\x00\x7f",
        is = [1, -2], fs = [1, 2.5, -inf, 1e300, nan, -0.0], ss = ["", "b"], t = float16[2, 0] {},
        e: floats = [], n: strings = []> (x)
  })");
  const Attributes& attributes = graph.node(graph.order()[0]).attributes;
  EXPECT_EQ(std::get<int64_t>(attributes.at("i")), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(std::get<double>(attributes.at("f")), 0.1);
  EXPECT_EQ(std::get<std::string>(attributes.at("s")), std::string("a\"b\\\n\t\0\x7f", 8));
  EXPECT_EQ(std::get<std::vector<double>>(attributes.at("fs"))[3], 1e300);
  EXPECT_TRUE(std::get<std::vector<std::string>>(attributes.at("n")).empty());
  expect_round_trip(graph);
}

TEST(text, schema_decides_open_kinds) {
  const Graph graph = parse(R"(graph (float32[2] x) => (y) {
    y = ortrain::Everything <f = 2, fs = [1, 2], e = [], is: ints = []> (x)
  })");
  const Attributes& attributes = graph.node(graph.order()[0]).attributes;
  EXPECT_EQ(std::get<double>(attributes.at("f")), 2.0);
  EXPECT_EQ(std::get<std::vector<double>>(attributes.at("fs")).size(), 2u);
  EXPECT_TRUE(std::get<std::vector<double>>(attributes.at("e")).empty());
  EXPECT_TRUE(std::get<std::vector<int64_t>>(attributes.at("is")).empty());
}

template <typename T>
void expect_constant_round_trip(DType dtype, const std::vector<T>& values) {
  Graph graph;
  const auto count = static_cast<int64_t>(values.size());
  const ValueId c = graph.add_constant(TensorData::from_values(dtype, {count}, values), "k");
  graph.add_output({c, "k", OutputRole::user, ""});
  expect_round_trip(graph);
}

TEST(text, round_trip_of_every_element_type) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  expect_constant_round_trip<float>(
      DType::f32, {0.1f, -0.0f, nan, -nan, inf, -inf, std::bit_cast<float>(0x7fc12345u), 1e-45f});
  expect_constant_round_trip<double>(DType::f64, {0.1, 1e-310, -HUGE_VAL, NAN, -NAN, 1.0 / 3});
  expect_constant_round_trip<Float16>(DType::f16, {Float16(0.1f), Float16(nan), Float16(-nan)});
  expect_constant_round_trip<BFloat16>(DType::bf16, {BFloat16(0.1f), BFloat16(nan), BFloat16(inf)});
  expect_constant_round_trip<int8_t>(DType::i8, {-128, 127});
  expect_constant_round_trip<uint8_t>(DType::u8, {0, 255});
  expect_constant_round_trip<int16_t>(DType::i16, {-32768, 32767});
  expect_constant_round_trip<uint16_t>(DType::u16, {65535});
  expect_constant_round_trip<int32_t>(DType::i32, {INT32_MIN, INT32_MAX});
  expect_constant_round_trip<uint32_t>(DType::u32, {UINT32_MAX});
  expect_constant_round_trip<int64_t>(DType::i64, {INT64_MIN, INT64_MAX});
  expect_constant_round_trip<uint64_t>(DType::u64, {UINT64_MAX, 0});
  expect_constant_round_trip<uint8_t>(DType::boolean, {0, 1});
}

TEST(text, large_constants_are_bytes_or_elided) {
  for (size_t count : {65u, 66u, 67u, 1000u}) {
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i) / 3;
    expect_constant_round_trip(DType::f32, values);
    Graph graph;
    const ValueId c = graph.add_constant(
        TensorData::from_values(DType::f32, {static_cast<int64_t>(count)}, values), "k");
    graph.add_output({c, "k", OutputRole::user, ""});
    EXPECT_THAT(print_graph(graph), HasSubstr("b64 \""));
    const std::string elided = print_graph(graph, {.elide_large_constants = true});
    EXPECT_THAT(elided, HasSubstr("{...}"));
    EXPECT_THAT(message_of<InvalidModelError>(elided), HasSubstr("elided"));
  }
  std::vector<uint8_t> bytes(100);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 37);
  expect_constant_round_trip(DType::u8, bytes);
}

TEST(text, repeats_an_element) {
  const Graph graph = parse("graph () => (k) { const k = float32[3, 40] {1.5, ...} }");
  const TensorData& constant = graph.value(graph.find_value("k")).constant;
  EXPECT_EQ(constant.numel(), 120);
  EXPECT_EQ(constant.data_as<float>()[119], 1.5f);
  EXPECT_THAT(print_graph(graph), HasSubstr("{1.5, ...}"));
  expect_round_trip(graph);
}

TEST(text, names_and_extents_that_need_quotes) {
  Graph graph;
  for (const char* name : {"a b", "float32", "_", "grad", "as", "1", "x-y", "\xc3\xa9", "a:b"}) {
    graph.add_input({kNoValue, InputRole::user, name, true}, name, DType::f32,
                    {Dim::symbol("batch size"), Dim::symbol("max(a, b)"), Dim::symbol("a]")});
  }
  graph.add_output({graph.inputs()[0].value, "", OutputRole::user, ""});
  expect_round_trip(graph);
}

TEST(text, unnamed_constants_never_take_a_name_of_the_text) {
  const Graph graph = parse(R"(graph (float32[2] x) => (c, c_1) {
    y = Add(x, float32[2] {1, 2})
    z = Add(y, float32[2] {1, 2})
    c = Add(z, float32 3)
    c_1 = Identity(c)
  })");
  EXPECT_EQ(graph.value(graph.outputs()[0].value).name, "c");
  EXPECT_EQ(graph.value(graph.outputs()[1].value).name, "c_1");
  expect_round_trip(graph);
}

TEST(text, an_empty_graph) { expect_round_trip(parse("graph () => () {}")); }

TEST(text, errors_of_syntax_have_a_place) {
  EXPECT_THAT(message_of<InvalidModelError>(""), StartsWith("1:1: "));
  EXPECT_THAT(message_of<InvalidModelError>("graph (float32[2] x) => (y) {\n  y = Add(x, q)\n}"),
              StartsWith("2:14: no value 'q'"));
  EXPECT_THAT(message_of<InvalidModelError>("graph (float32 x) => (y) { }"),
              StartsWith("1:23: no value 'y'"));
  EXPECT_THAT(message_of<InvalidModelError>("graph (float99 x) => () { }"),
              StartsWith("1:8: an element type"));
  EXPECT_THAT(message_of<InvalidModelError>("graph (float32 x, float32 x) => () { }"),
              HasSubstr("'x' is defined twice"));
  EXPECT_THAT(message_of<InvalidModelError>("graph (float32[-1] x) => () { }"),
              HasSubstr("negative"));
  EXPECT_THAT(message_of<InvalidModelError>("graph () => () { const k = int8 {300} }"),
              StartsWith("1:34: '300'"));
  EXPECT_THAT(message_of<InvalidModelError>("graph () => () { const k = int8[2] {3} }"),
              HasSubstr("2 elements, 1 are given"));
  EXPECT_THAT(message_of<InvalidModelError>("graph () => () { const k = int8[1] {3, 4} }"),
              HasSubstr("1 elements only"));
  EXPECT_THAT(message_of<InvalidModelError>("graph () => () { const k = bool[66] b64 \"AA\" }"),
              HasSubstr("base64"));
  EXPECT_THAT(message_of<InvalidModelError>("graph () => () { const k = bool[3] b64 \"AAEC\" }"),
              HasSubstr("neither 0 nor 1"));
  EXPECT_THAT(
      message_of<InvalidModelError>("graph () => () { const k = int8[4294967296, 4294967296] {} }"),
      HasSubstr("overflows"));
  EXPECT_THAT(message_of<InvalidModelError>("graph () => () { } x"), HasSubstr("ends before"));
  EXPECT_THAT(message_of<InvalidModelError>("graph \"a"), HasSubstr("no end"));
}

TEST(text, extents_are_not_endless) {
  const std::string end(10000, 'n');
  EXPECT_THAT(message_of<InvalidModelError>("graph (float32[" + end + "] x) => () { }"),
              StartsWith("1:16: "));
  EXPECT_THAT(message_of<InvalidModelError>("graph (float32[\"" + end + "\"] x) => () { }"),
              StartsWith("1:16: "));
}

TEST(text, errors_of_inference_keep_their_type_and_name_the_node) {
  EXPECT_THAT(message_of<ShapeError>(
                  "graph (float32[2] x, float32[3] w) => (y) {\n\n  y = Add(x, w) @fc/Add\n}"),
              StartsWith("3:3: [Add 'fc/Add'] "));
  EXPECT_THAT(message_of<DTypeError>("graph (int64[2] x) => (y) { y = Softmax(x) }"),
              HasSubstr("[Softmax] input 'x' is int64"));
  EXPECT_THAT(message_of<UnsupportedError>("graph (int64[2] x) => (y) { y = NoSuchOp(x) }"),
              HasSubstr("NoSuchOp"));
  EXPECT_THAT(
      message_of<InvalidModelError>("graph (float32 x) => (y) { y = Softmax <axis = \"a\"> (x) }"),
      HasSubstr("attribute 'axis' is of a wrong kind"));
}

TEST(text, every_prefix_of_a_model_is_refused) {
  const std::string text = print_graph(parse(kModel));
  for (size_t size = 0; size + 2 < text.size(); ++size) {
    EXPECT_THROW(parse(text.substr(0, size)), Error) << text.substr(0, size);
  }
}

TEST(text, repeated_elements_ask_for_so_much_memory_in_all) {
  std::string text = "graph g (float32[1] x) => (y) {\n";
  for (int i = 0; i < 5; ++i) text += str("  const c", i, " = float32[16777216] {0, ...}\n");
  text += "  y = Add(x, c0)\n}\n";
  EXPECT_THAT([&] { parse_graph(text); },
              ThrowsMessage<InvalidModelError>(HasSubstr("all that repeat an element")));
}

}  // namespace
}  // namespace ortrain
