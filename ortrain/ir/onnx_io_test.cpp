// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/onnx_io.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "ortrain/base/half.h"
#include "ortrain/ir/graph_compare.h"
#include "ortrain/ir/onnx_model_test.h"
#include "ortrain/ir/text.h"
#include "ortrain/ir/verifier.h"

namespace ortrain {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Graph parse(std::string_view text) { return parse_graph(text, sample_registry()); }

void expect_round_trip(const Graph& graph) {
  SCOPED_TRACE(print_graph(graph));
  const std::string bytes = to_onnx_bytes(graph);
  const Graph again = load_bytes(bytes).graph;
  EXPECT_EQ(first_difference(graph, again), "");
  EXPECT_EQ(to_onnx_bytes(again), bytes);
  verify(again, sample_registry());
}

constexpr std::string_view kModel = R"(
graph "my model" (float32[b, 2*s + 1] x [user grad], float32[4, 1] w [parameter "fc.weight" grad],
                  float32[4] m [buffer bn.mean], int64 s [seed],
                  float32[b, 2*s + 1] dy [gradient y])
    => (y, m2 as running [buffer_update m], dx as "x grad" [gradient x], y as y2, x as x_again,
        y as m2) {
  const c = float32 {0.5}
  y, _ = Dropout <seed = 3> (x, c) @ encoder.layer.0/Dropout
  m2 = Add(m, m) @"odd name"
  e = ortrain::Everything <i = -9223372036854775808, f = 0.1, s = "a\x00b", is = [1, -2],
      fs = [1, 2.5, -inf, 1e300, nan, -0.0], ss = ["", "b"], t = float16[2, 0] {},
      e: floats = [], n: strings = []> (m2, w, m2)
backward:
  d = Softmax(dy)
forward:
  e2 = Identity(e)
backward:
  dx = Dropout(d, _, bool true)
}
)";

TEST(onnx_io, round_trip_keeps_everything) {
  expect_round_trip(parse(kModel));
  expect_round_trip(parse("graph () => () {}"));
  expect_round_trip(parse("graph (float32 x) => (x, x as y, c) { const c = int64[2] {1, 2} }"));
}

TEST(onnx_io, round_trip_of_extents_that_only_the_data_tell) {
  expect_round_trip(parse("graph (float32[b] x) => (z) { y = NonZero(x)\n z = Identity(y) }"));
}

TEST(onnx_io, saved_models_are_plain_onnx) {
  onnx::ModelProto model;
  ASSERT_TRUE(model.ParseFromString(to_onnx_bytes(parse(kModel))));
  ASSERT_EQ(model.opset_import_size(), 2);
  EXPECT_EQ(model.opset_import(0).version(), 23);
  EXPECT_EQ(model.opset_import(1).domain(), "ortrain");
  const onnx::GraphProto& graph = model.graph();
  EXPECT_EQ(graph.name(), "my model");
  EXPECT_EQ(graph.input(0).type().tensor_type().shape().dim(1).dim_param(), "2*s + 1");
  EXPECT_EQ(graph.node(0).name(), "encoder.layer.0/Dropout");
  EXPECT_EQ(graph.node(0).output(1), "");
  EXPECT_EQ(graph.node(2).attribute(1).f(), 0.1f);
  // An output that is no computed value, or stands there twice, is a value of its own.
  std::vector<std::string> outputs;
  for (const onnx::ValueInfoProto& output : graph.output()) outputs.push_back(output.name());
  EXPECT_THAT(outputs, ElementsAre("y", "running", "x grad", "y2", "x_again", "m2_1"));
}

template <typename T>
void expect_constant_round_trip(DType dtype, const std::vector<T>& values) {
  Graph graph;
  const auto count = static_cast<int64_t>(values.size());
  const ValueId c = graph.add_constant(TensorData::from_values(dtype, {count, 1}, values), "k");
  graph.add_output({c, "k", OutputRole::user, ""});
  expect_round_trip(graph);
}

TEST(onnx_io, round_trip_of_every_element_type) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  expect_constant_round_trip<float>(DType::f32, {0.1f, -0.0f, nan, -nan});
  expect_constant_round_trip<double>(DType::f64, {0.1, 1e-310, -HUGE_VAL, NAN});
  expect_constant_round_trip<Float16>(DType::f16, {Float16(0.1f), Float16(nan)});
  expect_constant_round_trip<BFloat16>(DType::bf16, {BFloat16(0.1f), BFloat16(nan)});
  expect_constant_round_trip<int8_t>(DType::i8, {-128, 127});
  expect_constant_round_trip<uint8_t>(DType::u8, {0, 255});
  expect_constant_round_trip<int16_t>(DType::i16, {-32768, 32767});
  expect_constant_round_trip<uint16_t>(DType::u16, {65535});
  expect_constant_round_trip<int32_t>(DType::i32, {INT32_MIN, INT32_MAX});
  expect_constant_round_trip<uint32_t>(DType::u32, {UINT32_MAX});
  expect_constant_round_trip<int64_t>(DType::i64, {INT64_MIN, INT64_MAX});
  expect_constant_round_trip<uint64_t>(DType::u64, {UINT64_MAX, 0});
  expect_constant_round_trip<uint8_t>(DType::boolean, {0, 1});
  expect_constant_round_trip<float>(DType::f32, {});
}

TEST(onnx_io, an_edited_float_wins_over_its_digits) {
  const Graph graph = parse("graph (float32 x) => (y) { y = LeakyRelu <alpha = 0.1> (x) }");
  onnx::ModelProto model;
  ASSERT_TRUE(model.ParseFromString(to_onnx_bytes(graph)));
  model.mutable_graph()->mutable_node(0)->mutable_attribute(0)->set_f(0.5f);
  const Graph edited = load_proto(model).graph;
  EXPECT_EQ(std::get<double>(edited.node(0).attributes.at("alpha")), 0.5);
}

TEST(onnx_io, a_foreign_float_is_widened) {
  onnx::ModelProto model = foreign_model();
  auto* node = model.mutable_graph()->mutable_node(0);
  node->set_op_type("LeakyRelu");
  add_attribute(node, "alpha", onnx::AttributeProto::FLOAT)->set_f(0.1f);
  const Graph graph = load_proto(model).graph;
  EXPECT_EQ(std::get<double>(graph.node(0).attributes.at("alpha")), static_cast<double>(0.1f));
}

TEST(onnx_io, parameters_come_back_with_their_values) {
  const Graph graph = parse(kModel);
  SaveOptions options;
  options.values["fc.weight"] =
      TensorData::from_values(DType::f32, {4, 1}, std::vector<float>{1, 2, 3, 4});
  options.values["bn.mean"] =
      TensorData::from_values(DType::f32, {4}, std::vector<float>{5, 6, 7, 8});
  const OnnxModel model = load_bytes(to_onnx_bytes(graph, options));
  EXPECT_EQ(first_difference(graph, model.graph), "");
  ASSERT_EQ(model.values.size(), 2u);
  EXPECT_TRUE(model.values.at("fc.weight").equals(options.values["fc.weight"]));
  EXPECT_TRUE(model.values.at("bn.mean").equals(options.values["bn.mean"]));

  options.values["bn.mean"] = TensorData::scalar(DType::f32, 1);
  EXPECT_THROW(to_onnx_bytes(graph, options), InvalidModelError);
  options.values.erase("bn.mean");
  options.values["no such parameter"] = TensorData::scalar(DType::f32, 1);
  EXPECT_THROW(to_onnx_bytes(graph, options), InvalidModelError);
}

TEST(onnx_io, initializers_become_constants_or_parameters) {
  onnx::ModelProto model = foreign_model();
  model.mutable_graph()->mutable_node(0)->clear_input();
  model.mutable_graph()->mutable_node(0)->add_input("s");
  add_node(model, "Add", {"x", "w"}, {"s"});
  std::swap(*model.mutable_graph()->mutable_node(0), *model.mutable_graph()->mutable_node(1));
  add_initializer(model, "w", 1, {3})->set_raw_data(std::string(12, '\0'));
  add_initializer(model, "k", 7, {1})->add_int64_data(5);
  // As before IR version 4.
  add_value(model.mutable_graph()->add_input(), "w", 1, {3});

  OnnxModel loaded = load_proto(model);
  EXPECT_EQ(loaded.graph.inputs().size(), 1u);
  EXPECT_EQ(loaded.graph.value(loaded.graph.find_value("w")).kind, ValueKind::constant);
  EXPECT_TRUE(loaded.values.empty());

  LoadOptions options;
  options.initializers = LoadOptions::Initializers::parameters;
  loaded = load_proto(model, options);
  ASSERT_EQ(loaded.graph.inputs().size(), 2u);
  EXPECT_EQ(loaded.graph.inputs()[1].role, InputRole::parameter);
  EXPECT_EQ(loaded.graph.inputs()[1].target, "w");
  EXPECT_TRUE(loaded.graph.inputs()[1].requires_grad);
  EXPECT_EQ(loaded.values.at("w").numel(), 3);
  EXPECT_EQ(loaded.graph.value(loaded.graph.find_value("k")).kind, ValueKind::constant);

  options.parameter_names = {"k"};
  loaded = load_proto(model, options);
  ASSERT_EQ(loaded.graph.inputs().size(), 2u);
  EXPECT_EQ(loaded.graph.inputs()[1].target, "k");
  options.parameter_names = {"q"};
  EXPECT_THAT(refusal<InvalidModelError>(model, options), HasSubstr("\"q\""));
}

TEST(onnx_io, typed_fields_of_every_element_type) {
  const auto check = [](int dtype, const auto& fill, const auto& expected) {
    onnx::ModelProto model = model_with_initializer(dtype, {2});
    fill(*model.mutable_graph()->mutable_initializer(0));
    const Graph graph = load_proto(model).graph;
    const TensorData& data = graph.value(graph.find_value("w")).constant;
    ASSERT_EQ(data.bytes(), sizeof(expected));
    EXPECT_EQ(std::memcmp(data.data(), &expected, sizeof(expected)), 0) << "type " << dtype;
  };
  const auto int32s = [](int32_t a, int32_t b) {
    return [=](onnx::TensorProto& t) { t.add_int32_data(a), t.add_int32_data(b); };
  };
  check(1, [](auto& t) { t.add_float_data(0.5f), t.add_float_data(-1); }, std::array{0.5f, -1.0f});
  check(2, int32s(0, 255), std::array<uint8_t, 2>{0, 255});
  check(3, int32s(-128, 127), std::array<int8_t, 2>{-128, 127});
  check(4, int32s(0, 65535), std::array<uint16_t, 2>{0, 65535});
  check(5, int32s(-32768, 7), std::array<int16_t, 2>{-32768, 7});
  check(6, int32s(INT32_MIN, 7), std::array<int32_t, 2>{INT32_MIN, 7});
  check(
      7, [](auto& t) { t.add_int64_data(INT64_MIN), t.add_int64_data(1); },
      std::array<int64_t, 2>{INT64_MIN, 1});
  check(9, int32s(1, 0), std::array<uint8_t, 2>{1, 0});
  check(10, int32s(0x3c00, 0xfc00), std::array<uint16_t, 2>{0x3c00, 0xfc00});
  check(11, [](auto& t) { t.add_double_data(0.1), t.add_double_data(-1); }, std::array{0.1, -1.0});
  check(
      12, [](auto& t) { t.add_uint64_data(0), t.add_uint64_data(UINT32_MAX); },
      std::array<uint32_t, 2>{0, UINT32_MAX});
  check(
      13, [](auto& t) { t.add_uint64_data(0), t.add_uint64_data(UINT64_MAX); },
      std::array<uint64_t, 2>{0, UINT64_MAX});
  check(16, int32s(0x3f80, 0xff80), std::array<uint16_t, 2>{0x3f80, 0xff80});
}

TEST(onnx_io, constant_nodes_become_constants) {
  using Proto = onnx::AttributeProto;
  const auto load = [](const std::string& name, Proto::AttributeType type, const auto& fill) {
    onnx::ModelProto model = foreign_model();
    add_value(model.mutable_graph()->add_output(), "k", 0, {});
    model.mutable_graph()->mutable_output(1)->clear_type();
    fill(*add_attribute(add_node(model, "Constant", {}, {"k"}), name, type));
    const Graph graph = load_proto(model).graph;
    return graph.value(graph.find_value("k")).constant;
  };
  EXPECT_EQ(load("value_int", Proto::INT, [](Proto& a) { a.set_i(7); }).to_double(), 7);
  EXPECT_EQ(load("value_float", Proto::FLOAT, [](Proto& a) { a.set_f(0.5f); }).dtype(), DType::f32);
  EXPECT_EQ(load("value_ints", Proto::INTS, [](Proto& a) { a.add_ints(7); }).dims(), Dims{1});
  EXPECT_EQ(load("value_floats", Proto::FLOATS, [](Proto& a) { a.add_floats(7); }).dims(), Dims{1});
  const TensorData tensor = load("value", Proto::TENSOR, [](Proto& a) {
    a.mutable_t()->set_data_type(7);
    a.mutable_t()->add_int64_data(3);
  });
  EXPECT_EQ(tensor.to_int64s(), std::vector<int64_t>{3});
  EXPECT_EQ(tensor.dims(), Dims{});

  onnx::ModelProto model = foreign_model();
  onnx::NodeProto* node = add_node(model, "Constant", {}, {"k"});
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("[Constant 'layer/Constant']"));
  add_attribute(node, "value_string", Proto::STRING)->set_s("a");
  EXPECT_THAT(refusal<UnsupportedError>(model), HasSubstr("strings"));
  node->mutable_attribute(0)->set_name("value_int");
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("wrong kind"));
}

TEST(onnx_io, opsets_outside_the_range_of_an_operator) {
  onnx::ModelProto model = foreign_model();
  load_proto(model);
  model.mutable_opset_import(0)->set_domain("ai.onnx");
  load_proto(model);
  model.mutable_opset_import(0)->set_version(12);
  EXPECT_THAT(refusal<UnsupportedError>(model),
              AllOf(HasSubstr("[Softmax 'layer/Softmax']"), HasSubstr("opset 12"),
                    HasSubstr("since opset 13")));
  model.mutable_opset_import(0)->set_version(28);
  load_proto(model);
  add_attribute(model.mutable_graph()->mutable_node(0), "of_later", onnx::AttributeProto::INT);
  EXPECT_THAT(refusal<UnsupportedError>(model),
              AllOf(HasSubstr("'of_later'"), HasSubstr("opset 28")));
  model.mutable_opset_import(0)->set_version(23);
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("of_later"));
  model.mutable_opset_import(0)->set_version(29);
  EXPECT_THAT(refusal<UnsupportedError>(model), HasSubstr("opset 29"));
  model.mutable_opset_import(0)->set_version(0);
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("opset 0"));
  model.clear_opset_import();
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("no opset"));
  model = foreign_model();
  model.add_opset_import()->set_version(16);
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("two opsets"));
  model = foreign_model();
  model.set_ir_version(2);
  EXPECT_THAT(refusal<UnsupportedError>(model), HasSubstr("IR version 2"));
  model.set_ir_version(99);
  EXPECT_THAT(refusal<UnsupportedError>(model), HasSubstr("IR version 99"));
  model.clear_ir_version();
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("no IR version"));
}

TEST(onnx_io, what_is_valid_and_not_supported_names_node_and_layer) {
  using Proto = onnx::AttributeProto;
  onnx::ModelProto model = foreign_model();
  model.mutable_graph()->mutable_node(0)->set_op_type("NoSuchOp");
  EXPECT_THAT(refusal<UnsupportedError>(model),
              AllOf(HasSubstr("[NoSuchOp 'layer/Softmax']"), HasSubstr("not known")));
  model.mutable_graph()->mutable_node(0)->clear_name();
  EXPECT_THAT(refusal<UnsupportedError>(model), HasSubstr("[NoSuchOp '-> y']"));

  const std::pair<Proto::AttributeType, const char*> kinds[] = {{Proto::GRAPH, "a subgraph"},
                                                                {Proto::GRAPHS, "a subgraph"},
                                                                {Proto::SPARSE_TENSOR, "sparse"},
                                                                {Proto::TENSORS, "list of tensors"},
                                                                {Proto::TYPE_PROTO, "a type"}};
  for (const auto& [type, text] : kinds) {
    model = foreign_model();
    add_attribute(model.mutable_graph()->mutable_node(0), "body", type);
    EXPECT_THAT(refusal<UnsupportedError>(model),
                AllOf(HasSubstr("[Softmax 'layer/Softmax']"), HasSubstr(text)));
  }
  model = foreign_model();
  add_attribute(model.mutable_graph()->mutable_node(0), "axis", Proto::INT)->set_ref_attr_name("a");
  EXPECT_THAT(refusal<UnsupportedError>(model), HasSubstr("reference"));

  model = foreign_model();
  model.add_functions()->set_name("f");
  EXPECT_THAT(refusal<UnsupportedError>(model), HasSubstr("functions"));
  model = foreign_model();
  model.add_training_info();
  EXPECT_THAT(refusal<UnsupportedError>(model), HasSubstr("training_info"));
  model = foreign_model();
  model.mutable_graph()->add_sparse_initializer()->mutable_values()->set_name("sp");
  EXPECT_THAT(refusal<UnsupportedError>(model), HasSubstr("\"sp\""));
  model = foreign_model();
  model.mutable_graph()->mutable_input(0)->mutable_type()->mutable_tensor_type()->clear_shape();
  EXPECT_THAT(refusal<UnsupportedError>(model), AllOf(HasSubstr("\"x\""), HasSubstr("rank")));
  model = foreign_model();
  model.mutable_graph()->mutable_input(0)->mutable_type()->mutable_sequence_type();
  EXPECT_THAT(refusal<UnsupportedError>(model), HasSubstr("no dense tensor"));
  for (int dtype : {8, 14, 17, 21}) {
    EXPECT_THAT(refusal<UnsupportedError>(model_with_initializer(dtype, {1})),
                HasSubstr("element type"));
  }
}

TEST(onnx_io, inferred_and_stated_types_must_fit) {
  onnx::ModelProto model = foreign_model();
  add_value(model.mutable_graph()->add_value_info(), "y", 1, {2, 4});
  EXPECT_THAT(refusal<InvalidModelError>(model),
              AllOf(HasSubstr("\"y\""), HasSubstr("FLOAT[2, 4]"), HasSubstr("float32[2, 3]")));
  model = foreign_model();
  add_value(model.mutable_graph()->add_value_info(), "y", 11, {2, 3});
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("DOUBLE"));
  model = foreign_model();
  model.mutable_graph()->clear_output();
  add_value(model.mutable_graph()->add_output(), "y", 1, {2});
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("\"y\""));
  model = foreign_model();
  add_value(model.mutable_graph()->add_value_info(), "gone", 1, {7});
  model.mutable_graph()->mutable_input(0)->mutable_type()->mutable_tensor_type()->set_elem_type(7);
  EXPECT_THAT(refusal<UnsupportedError>(model), HasSubstr("input 'x' of type int64"));
  model = foreign_model();
  add_initializer(model, "w", 11, {3})->set_raw_data(std::string(24, '\0'));
  model.mutable_graph()->mutable_node(0)->set_op_type("Add");
  model.mutable_graph()->mutable_node(0)->add_input("w");
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("input 'b' is float64"));
}

TEST(onnx_io, extents_of_foreign_models) {
  onnx::ModelProto model = foreign_model();
  auto* shape = model.mutable_graph()
                    ->mutable_input(0)
                    ->mutable_type()
                    ->mutable_tensor_type()
                    ->mutable_shape();
  model.mutable_graph()->clear_output();
  model.mutable_graph()->add_output()->set_name("y");
  const auto load_extent = [&](const std::string& text) {
    shape->mutable_dim(0)->set_dim_param(text);
    const Graph graph = load_proto(model).graph;
    expect_round_trip(graph);
    return graph.value(graph.inputs()[0].value).shape[0];
  };
  EXPECT_EQ(load_extent("batch"), Dim::symbol("batch"));
  EXPECT_EQ(load_extent("2*s + 1"), Dim(2) * Dim::symbol("s") + Dim(1));
  EXPECT_EQ(load_extent("128"), Dim(128));
  EXPECT_EQ(load_extent("batch size").str(), "_batch_x20size");
  EXPECT_EQ(load_extent("?").str(), "__x3f");
  EXPECT_EQ(load_extent("(a + b)*(a + b)").symbols().size(), 1u);
  EXPECT_EQ(load_extent("max(a, b)").str(), "max(a, b)");
  EXPECT_EQ(load_extent(std::string(5000, 'a')).str().size(), 201u);
  EXPECT_LE(load_extent(std::string(5000, ' ')).str().size(), 256u);
  EXPECT_LE(load_extent(std::string(500, 'a') + "*b").str().size(), 256u);
  shape->mutable_dim(0)->clear_value();
  const Graph graph = load_proto(model).graph;
  EXPECT_EQ(graph.value(graph.inputs()[0].value).shape[0].str(), "x.d0");
  EXPECT_EQ(graph.value(graph.outputs()[0].value).shape[0].str(), "x.d0");
  shape->mutable_dim(0)->set_dim_param("-1");
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("negative"));
}

TEST(onnx_io, saves_and_loads_files) {
  const TemporaryFolder folder;
  const Graph graph = parse(kModel);
  save_onnx(graph, folder / "model.onnx");
  EXPECT_EQ(
      first_difference(graph, load_onnx_model(folder / "model.onnx", {}, sample_registry()).graph),
      "");
  EXPECT_THAT(folder.names(), ElementsAre("model.onnx"));
  EXPECT_THROW(save_onnx(graph, folder / "missing/model.onnx"), FileError);
  EXPECT_THROW(save_onnx(graph, folder.path()), FileError);
  EXPECT_THROW(load_onnx(folder / "missing.onnx"), FileError);
}

TEST(onnx_io, a_path_without_folder) {
  const TemporaryFolder folder;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  const Graph graph = parse(kModel);
  SaveOptions options;
  options.external_data_threshold = 0;
  save_onnx(graph, "model.onnx", options);
  const OnnxModel loaded = load_onnx_model("model.onnx", {}, sample_registry());
  std::filesystem::current_path(before);
  EXPECT_EQ(first_difference(graph, loaded.graph), "");
}

TEST(onnx_io, external_data) {
  const TemporaryFolder folder;
  std::vector<float> values(5000);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  Graph graph;
  for (const char* name : {"a", "b"}) {
    values[0] += 1;
    const ValueId c = graph.add_constant(TensorData::from_values(DType::f32, {5000}, values), name);
    graph.add_output({c, name, OutputRole::user, ""});
  }
  graph.add_output({graph.add_constant(TensorData::scalar(DType::f64, 0.1), "small"), "small",
                    OutputRole::user, ""});
  SaveOptions options;
  options.external_data_threshold = 1024;
  save_onnx(graph, folder / "m.onnx", options);
  ASSERT_EQ(folder.names().size(), 2u);
  EXPECT_THAT(folder.names()[1], ::testing::MatchesRegex("m.onnx.[0-9a-f]+.data"));
  EXPECT_LT(std::filesystem::file_size(folder / "m.onnx"), 2000u);
  Graph loaded = load_onnx_model(folder / "m.onnx", {}, sample_registry()).graph;
  EXPECT_EQ(first_difference(graph, loaded), "");

  options.external_data_file = "weights.bin";
  save_onnx(graph, folder / "m.onnx", options);
  loaded = load_onnx_model(folder / "m.onnx", {}, sample_registry()).graph;
  EXPECT_EQ(first_difference(graph, loaded), "");
  for (const char* name : {"../w", "a/w", "/w", "m.onnx"}) {
    options.external_data_file = name;
    EXPECT_THROW(save_onnx(graph, folder / "m.onnx", options), FileError) << name;
  }
  EXPECT_THROW(to_onnx_bytes(graph, options), UnsupportedError);
}

}  // namespace
}  // namespace ortrain
