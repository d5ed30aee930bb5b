// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// One test for each way in which a model could hurt who loads it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <fstream>
#include <functional>

#include "ortrain/ir/onnx_memory.h"
#include "ortrain/ir/onnx_model_test.h"

namespace ortrain {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;

// --- tensors

TEST(onnx_security, raw_data_has_the_size_of_type_and_shape) {
  for (size_t size : {0u, 11u, 13u, 12000u}) {
    onnx::ModelProto model = model_with_initializer(1, {3});
    model.mutable_graph()->mutable_initializer(0)->set_raw_data(std::string(size, 'x'));
    EXPECT_THAT(refusal<InvalidModelError>(model),
                AllOf(HasSubstr("\"w\""), HasSubstr("needs 12")));
  }
}

TEST(onnx_security, typed_fields_have_the_size_of_the_shape) {
  for (int dtype : {1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 16}) {
    onnx::ModelProto model = model_with_initializer(dtype, {3});
    EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("needs 3 elements"));
    onnx::TensorProto& tensor = *model.mutable_graph()->mutable_initializer(0);
    tensor.add_float_data(1);
    tensor.add_int32_data(1);
    tensor.add_int64_data(1);
    EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("of 3 stored"));
  }
}

TEST(onnx_security, typed_elements_are_in_the_range_of_the_type) {
  const std::pair<int, int32_t> cases[] = {{2, 256}, {2, -1},     {3, 128},   {3, -129},
                                           {4, -1},  {4, 65536},  {5, 32768}, {9, 2},
                                           {9, -1},  {10, 65536}, {16, -1}};
  for (const auto& [dtype, value] : cases) {
    onnx::ModelProto model = model_with_initializer(dtype, {1});
    model.mutable_graph()->mutable_initializer(0)->add_int32_data(value);
    refusal<InvalidModelError>(model);
  }
  onnx::ModelProto model = model_with_initializer(12, {1});
  model.mutable_graph()->mutable_initializer(0)->add_uint64_data(uint64_t{1} << 32);
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("out of range"));
}

TEST(onnx_security, bool_bytes_are_0_or_1) {
  onnx::ModelProto model = model_with_initializer(9, {2});
  model.mutable_graph()->mutable_initializer(0)->set_raw_data(std::string("\x01\x02", 2));
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("bool"));
}

TEST(onnx_security, shapes_that_overflow) {
  const int64_t huge = int64_t{1} << 62;
  for (const std::vector<int64_t>& dims :
       std::vector<std::vector<int64_t>>{{huge},
                                         {huge, huge},
                                         {int64_t{1} << 32, int64_t{1} << 32},
                                         {INT64_MAX},
                                         {-1},
                                         {-4, 3},
                                         {INT64_MIN},
                                         {3, INT64_MIN},
                                         std::vector<int64_t>(65, 1)}) {
    onnx::ModelProto model = model_with_initializer(1, dims);
    refusal<InvalidModelError>(model);
    model.mutable_graph()->mutable_initializer(0)->set_raw_data(std::string(12, '\0'));
    refusal<InvalidModelError>(model);
  }
  // No element: the other extents may be long, but products of them are counted with.
  onnx::ModelProto model = model_with_initializer(1, {huge, huge, 0});
  refusal<InvalidModelError>(model);
  model = model_with_initializer(1, {int64_t{1} << 40, 0, 3});
  EXPECT_EQ(load_proto(model).graph.num_values(), 2u + 1u);
}

TEST(onnx_security, extents_of_inputs_that_overflow) {
  onnx::ModelProto model = foreign_model();
  auto* shape = model.mutable_graph()
                    ->mutable_input(0)
                    ->mutable_type()
                    ->mutable_tensor_type()
                    ->mutable_shape();
  for (const char* text : {"9223372036854775807*s*9", "99999999999999999*99999999999999999*s",
                           "9223372036854775808"}) {
    shape->mutable_dim(0)->set_dim_param(text);
    try {
      load_proto(model);
    } catch (const InvalidModelError&) {
      continue;  // too large, or taken as a symbol
    }
  }
  shape->mutable_dim(0)->set_dim_value(-1);
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("negative"));
}

TEST(onnx_security, contents_given_twice) {
  onnx::ModelProto model = model_with_initializer(1, {1});
  model.mutable_graph()->mutable_initializer(0)->set_raw_data(std::string(4, '\0'));
  model.mutable_graph()->mutable_initializer(0)->add_float_data(1);
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("twice"));
}

TEST(onnx_security, tensors_in_segments) {
  onnx::ModelProto model = model_with_initializer(1, {1});
  model.mutable_graph()->mutable_initializer(0)->mutable_segment()->set_end(1);
  EXPECT_THAT(refusal<UnsupportedError>(model), HasSubstr("segments"));
}

TEST(onnx_security, attributes_and_constants_use_the_same_reader) {
  onnx::ModelProto model = foreign_model();
  auto* attribute =
      add_attribute(add_node(model, "Constant", {}, {"k"}), "value", onnx::AttributeProto::TENSOR);
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("has none"));
  attribute->mutable_t()->set_data_type(1);
  attribute->mutable_t()->add_dims(int64_t{1} << 40);
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("\"value\""));
  attribute->mutable_t()->set_data_location(onnx::TensorProto::EXTERNAL);
  auto* entry = attribute->mutable_t()->add_external_data();
  entry->set_key("location");
  entry->set_value("../secret");
  LoadOptions options;
  options.external_data_directory = "/tmp";
  EXPECT_THAT(refusal<InvalidModelError>(model, options), HasSubstr("out of the folder"));
}

// --- external data

class onnx_external : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directory(folder_ / "model");
    std::ofstream(folder_ / "model/w.bin") << std::string(64, '\x01');
    std::ofstream(folder_ / "secret") << std::string(64, 's');
  }

  using Entries = std::vector<std::pair<std::string, std::string>>;

  static onnx::ModelProto model(const Entries& entries, const std::vector<int64_t>& dims = {4}) {
    onnx::ModelProto result = model_with_initializer(2, dims);
    onnx::TensorProto& tensor = *result.mutable_graph()->mutable_initializer(0);
    tensor.set_data_location(onnx::TensorProto::EXTERNAL);
    for (const auto& [key, value] : entries) {
      auto* entry = tensor.add_external_data();
      entry->set_key(key);
      entry->set_value(value);
    }
    return result;
  }

  std::filesystem::path save(const onnx::ModelProto& proto) const {
    return folder_.write("model/m.onnx", proto.SerializeAsString());
  }

  TensorData load(const Entries& entries, const std::vector<int64_t>& dims = {4},
                  const LoadOptions& options = {}) const {
    const Graph graph =
        load_onnx_model(save(model(entries, dims)), options, sample_registry()).graph;
    return graph.value(graph.find_value("w")).constant;
  }

  std::string refused(const Entries& entries, const std::vector<int64_t>& dims = {4}) const {
    try {
      load(entries, dims);
    } catch (const InvalidModelError& error) {
      return error.what();
    }
    ADD_FAILURE() << "accepted";
    return "";
  }

  TemporaryFolder folder_;
};

TEST_F(onnx_external, is_read) {
  EXPECT_EQ(load({{"location", "w.bin"}}).to_int64s(), (std::vector<int64_t>{1, 1, 1, 1}));
  EXPECT_EQ(load({{"location", "w.bin"}, {"offset", "60"}, {"length", "4"}}).numel(), 4);
  EXPECT_EQ(load({{"location", "w.bin"}, {"offset", "64"}}, {0}).numel(), 0);
}

TEST_F(onnx_external, bytes_in_memory_have_no_folder) {
  EXPECT_THAT(refusal<UnsupportedError>(model({{"location", "w.bin"}})), HasSubstr("no folder"));
  LoadOptions options;
  options.external_data_directory = folder_ / "model";
  load_proto(model({{"location", "w.bin"}}), options);
}

TEST_F(onnx_external, paths_out_of_the_folder) {
  for (const std::string& location :
       {std::string("../secret"), std::string("a/../../secret"), std::string("..\\secret"),
        (folder_ / "secret").string(), std::string("w.bin\0", 6), std::string(), std::string("."),
        std::string("/dev/zero"), std::string("..")}) {
    EXPECT_THAT(refused({{"location", location}}), HasSubstr("the file name"));
  }
}

TEST_F(onnx_external, what_is_no_regular_file) {
  std::filesystem::create_directory(folder_ / "model/d");
  ASSERT_EQ(::mkfifo((folder_ / "model/pipe").c_str(), 0600), 0);
  EXPECT_THAT(refused({{"location", "d"}}), HasSubstr("a folder"));
  EXPECT_THAT(refused({{"location", "pipe"}}), HasSubstr("a FIFO"));
}

TEST_F(onnx_external, links) {
  std::filesystem::create_symlink(folder_ / "secret", folder_ / "model/link");
  std::filesystem::create_directory_symlink(folder_.path(), folder_ / "model/up");
  std::filesystem::create_hard_link(folder_ / "secret", folder_ / "model/hard");
  EXPECT_THAT(refused({{"location", "link"}}), HasSubstr("link"));
  EXPECT_THAT(refused({{"location", "up/secret"}}), HasSubstr("link"));
  EXPECT_THAT(refused({{"location", "hard"}}), HasSubstr("hard links"));
  LoadOptions options;
  options.allow_links = true;
  EXPECT_EQ(load({{"location", "link"}}, {4}, options).numel(), 4);
}

TEST_F(onnx_external, keys_are_an_allow_list) {
  EXPECT_THAT(refused({{"location", "w.bin"}, {"__class__", "x"}}), HasSubstr("not known"));
  EXPECT_THAT(refused({{"location", "w.bin"}, {"basepath", "/"}}), HasSubstr("not known"));
  EXPECT_THAT(refused({{"location", "w.bin"}, {"location", "w.bin"}}), HasSubstr("twice"));
  EXPECT_THAT(refused({{"offset", "0"}}), HasSubstr("no location"));
  EXPECT_THROW(load({{"location", "w.bin"}, {"checksum", "0"}}), UnsupportedError);
}

TEST_F(onnx_external, numbers_out_of_range) {
  for (const char* offset : {"-1", "65", "18446744073709551615", "9223372036854775807", "1e3", "",
                             " 1", "0x10", "99999999999999999999999"}) {
    refused({{"location", "w.bin"}, {"offset", offset}});
  }
  for (const char* length : {"-4", "3", "5", "9223372036854775807", "x"}) {
    refused({{"location", "w.bin"}, {"length", length}});
  }
  EXPECT_THAT(refused({{"location", "w.bin"}, {"offset", "61"}}), HasSubstr("which has 64"));
  // Larger than the file: refused before anything is allocated.
  EXPECT_THAT(refused({{"location", "w.bin"}}, {int64_t{1} << 50}), HasSubstr("which has 64"));
}

TEST_F(onnx_external, tensors_take_no_more_than_the_file_has) {
  onnx::ModelProto proto = model({{"location", "w.bin"}}, {64});
  onnx::TensorProto tied = proto.graph().initializer(0);
  tied.set_name("tied");
  *proto.mutable_graph()->add_initializer() = tied;
  const OnnxModel loaded = load_onnx_model(save(proto), {}, sample_registry());
  const auto data = [&](const char* name) {
    return loaded.graph.value(loaded.graph.find_value(name)).constant.data();
  };
  EXPECT_EQ(data("w"), data("tied"));
  // Each a little shorter than the one before: no two alike, all the same bytes.
  for (int i = 1; i < 8; ++i) {
    tied.set_name(str("part", i));
    tied.set_dims(0, 64 - i);
    *proto.mutable_graph()->add_initializer() = tied;
  }
  try {
    load_onnx_model(save(proto), {}, sample_registry());
    ADD_FAILURE();
  } catch (const InvalidModelError& error) {
    EXPECT_THAT(error.what(), HasSubstr("overlap"));
  }
}

TEST_F(onnx_external, the_model_itself_is_a_regular_file) {
  ASSERT_EQ(::mkfifo((folder_ / "pipe.onnx").c_str(), 0600), 0);
  EXPECT_THROW(load_onnx(folder_ / "pipe.onnx"), FileError);
  EXPECT_THROW(load_onnx("/dev/zero"), FileError);
  EXPECT_THROW(load_onnx(folder_.path()), FileError);
}

// --- structure

TEST(onnx_security, names_defined_twice) {
  onnx::ModelProto model = foreign_model();
  add_node(model, "Softmax", {"x"}, {"y"});
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("'y' is defined twice"));
  model = foreign_model();
  add_value(model.mutable_graph()->add_input(), "x", 1, {2, 3});
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("'x' is defined twice"));
  model = model_with_initializer(1, {0});
  add_initializer(model, "w", 1, {0});
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("two initializers"));
  model = model_with_initializer(1, {0});
  add_value(model.mutable_graph()->add_input(), "w", 1, {0});
  load_proto(model);
  add_value(model.mutable_graph()->add_input(), "w", 1, {0});
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("twice"));
  model = foreign_model();
  add_initializer(model, "y", 1, {0});
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("'y' is defined twice"));
  model = foreign_model();
  *model.mutable_graph()->add_output() = model.graph().output(0);
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("listed twice"));
  model = foreign_model();
  model.mutable_graph()->mutable_node(0)->add_output("");
  model.mutable_graph()->mutable_node(0)->add_output("z");
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("at most 1 outputs"));
}

TEST(onnx_security, cycles_and_unordered_graphs) {
  onnx::ModelProto model = foreign_model();
  model.mutable_graph()->mutable_node(0)->set_input(0, "y");
  EXPECT_THAT(refusal<InvalidModelError>(model),
              AllOf(HasSubstr("[Softmax 'layer/Softmax']"), HasSubstr("cycle")));
  model = foreign_model();
  model.mutable_graph()->mutable_node(0)->set_input(0, "z");
  add_node(model, "Identity", {"y"}, {"z"});
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("cycle"));
}

TEST(onnx_security, missing_values) {
  onnx::ModelProto model = foreign_model();
  model.mutable_graph()->mutable_node(0)->set_input(0, "q");
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("\"q\" is made by nothing"));
  model = foreign_model();
  model.mutable_graph()->mutable_output(0)->set_name("q");
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("nothing makes it"));
  model = foreign_model();
  model.mutable_graph()->mutable_node(0)->clear_input();
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("required"));
  model = foreign_model();
  model.mutable_graph()->mutable_node(0)->set_input(0, "");
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("required"));
  model = foreign_model();
  model.mutable_graph()->mutable_node(0)->clear_op_type();
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("no operator"));
  model = foreign_model();
  model.mutable_graph()->mutable_input(0)->clear_type();
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("no type"));
  model = foreign_model();
  model.clear_graph();
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("no graph"));
}

TEST(onnx_security, variadic_operators_without_inputs) {
  onnx::ModelProto model = foreign_model();
  model.mutable_opset_import(0)->set_domain("ortrain");
  model.mutable_opset_import(0)->set_version(1);
  model.mutable_graph()->mutable_node(0)->set_op_type("Everything");
  model.mutable_graph()->mutable_node(0)->set_domain("ortrain");
  load_proto(model);
  model.mutable_graph()->mutable_node(0)->clear_input();
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("required and absent"));
}

TEST(onnx_security, attributes_of_a_wrong_kind) {
  onnx::ModelProto model = foreign_model();
  auto* node = model.mutable_graph()->mutable_node(0);
  auto* axis = add_attribute(node, "axis", onnx::AttributeProto::STRING);
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("wrong kind"));
  axis->clear_type();
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("no kind"));
  axis->set_type(onnx::AttributeProto::INT);
  *node->add_attribute() = *axis;
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("twice"));
}

TEST(onnx_security, metadata_of_ours_in_a_foreign_file) {
  onnx::ModelProto model = foreign_model();
  auto* entry = model.mutable_graph()->mutable_input(0)->add_metadata_props();
  entry->set_key("ortrain.role");
  entry->set_value("admin");
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("\"admin\""));
  model = foreign_model();
  entry = model.mutable_graph()->mutable_node(0)->add_metadata_props();
  entry->set_key("ortrain.phase");
  entry->set_value("sideways");
  EXPECT_THAT(refusal<InvalidModelError>(model), HasSubstr("\"sideways\""));
  entry->set_key("ortrain.alias");
  load_proto(model);  // means something on an Identity only
}

TEST(onnx_security, nesting_without_end) {
  // Subgraph in subgraph, 5000 times: node 1, attribute 5, graph 6.
  std::string body;
  for (int i = 0; i < 5000; ++i) {
    for (const uint32_t field : {6u, 5u, 1u}) {
      std::string outer;
      onnx::wire::Writer(outer).scalar(field, body);
      body = std::move(outer);
      if (body.size() > 100000) break;
    }
  }
  std::string model;
  onnx::wire::Writer(model).scalar(7, body);
  EXPECT_THROW(load_bytes(model), InvalidModelError);
}

TEST(onnx_security, bytes_that_are_no_model) {
  EXPECT_THROW(load_bytes(""), InvalidModelError);
  EXPECT_THROW(load_bytes("hello, world"), InvalidModelError);
  EXPECT_THROW(load_bytes(std::string(1000, '\0')), InvalidModelError);
  EXPECT_THROW(load_bytes(std::string(1000, '\xff')), InvalidModelError);
  const std::string whole = foreign_model().SerializeAsString();
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THROW(load_bytes(whole.substr(0, size)), Error) << size;
  }
}

// --- time and memory

// Peak of the resident memory since the last call of reset, in bytes; 0 where it cannot be told.
uint64_t peak_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stoull(line.substr(6)) * 1024;
  }
  return 0;
}

bool reset_peak_memory() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5";
  file.flush();
  return file.good();
}

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kMeasureMemory = false;
#else
constexpr bool kMeasureMemory = true;
#endif

void expect_cheap_refusal(const std::string& bytes, const char* what) {
  const bool measure = reset_peak_memory() && kMeasureMemory;
  const uint64_t before = peak_memory();
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THROW(load_bytes(bytes), Error) << what;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  EXPECT_LT(seconds.count(), 5.0) << what;
  if (measure) {
    EXPECT_LE(peak_memory() - before, 32 * bytes.size() + 64 * kMiB) << what;
  }
}

// A model whose graph holds `field` with `body` as often as fills `size` bytes, and then nonsense.
std::string flood(uint32_t field, const std::string& body, size_t size) {
  std::string element;
  onnx::wire::Writer(element).scalar(field, body);
  std::string graph;
  while (graph.size() < size) graph += element;
  onnx::NodeProto bad;
  bad.set_op_type("NoSuchOp");
  onnx::wire::Writer(graph).scalar(1, bad.SerializeAsString());
  onnx::ModelProto model = foreign_model();
  model.clear_graph();
  std::string bytes = model.SerializeAsString();
  onnx::wire::Writer(bytes).scalar(7, graph);
  return bytes;
}

TEST(onnx_security, refusal_is_cheap_for_floods_of_small_parts) {
  for (const size_t size : {size_t{100000}, 8 * kMiB}) {
    for (const uint32_t field : {1u, 5u, 11u, 12u, 13u, 14u, 15u, 16u}) {
      expect_cheap_refusal(flood(field, "", size), str("field ", field).c_str());
    }
    onnx::NodeProto node;
    node.set_op_type("Identity");
    for (int i = 0; i < 100; ++i) node.add_attribute();
    expect_cheap_refusal(flood(1, node.SerializeAsString(), size), "attributes");
    onnx::TensorProto tensor;
    for (int i = 0; i < 1000; ++i) tensor.add_dims(1);
    expect_cheap_refusal(flood(5, tensor.SerializeAsString(), size), "extents");
    onnx::TensorProto strings;
    for (int i = 0; i < 1000; ++i) strings.add_string_data("");
    expect_cheap_refusal(flood(5, strings.SerializeAsString(), size), "strings");
    onnx::ValueInfoProto info;
    for (int i = 0; i < 1000; ++i) {
      info.mutable_type()->mutable_tensor_type()->mutable_shape()->add_dim();
    }
    expect_cheap_refusal(flood(13, info.SerializeAsString(), size), "shapes");
  }
}

TEST(onnx_security, refusal_is_cheap_for_packed_numbers) {
  onnx::ModelProto model = model_with_initializer(7, {3});
  auto* data = model.mutable_graph()->mutable_initializer(0)->mutable_int64_data();
  data->assign(30 * kMiB, 1);
  std::string bytes = model.SerializeAsString();
  model.Clear();
  expect_cheap_refusal(bytes, "packed int64");
}

TEST(onnx_security, refusal_is_cheap_at_the_end_of_a_long_graph) {
  onnx::ModelProto model = foreign_model();
  model.mutable_graph()->clear_output();
  for (int i = 0; i < 30000; ++i) {
    add_node(model, "Identity", {i == 0 ? "y" : str("v", i - 1)}, {str("v", i)});
  }
  add_node(model, "Identity", {"nothing"}, {"z"});
  const std::string bytes = model.SerializeAsString();
  model.Clear();
  expect_cheap_refusal(bytes, "long graph");
}

TEST(onnx_security, a_long_graph_is_within_the_memory_limit) {
  onnx::ModelProto model = foreign_model();
  model.mutable_graph()->clear_node();
  for (int i = 0; i < 50000; ++i) {
    add_node(model, "Identity", {i == 0 ? "x" : str("v", i - 1)}, {str("v", i)});
  }
  model.mutable_graph()->mutable_output(0)->set_name("v49999");
  EXPECT_EQ(load_proto(model).graph.order().size(), 50000u);
}

TEST(onnx_security, the_memory_limit_can_be_set) {
  LoadOptions options;
  options.memory_limit = 1000;
  EXPECT_THAT(refusal<UnsupportedError>(foreign_model(), options), HasSubstr("limit is 1000"));
}

TEST(onnx_security, large_tensors_are_within_the_memory_limit) {
  onnx::ModelProto model = model_with_initializer(2, {int64_t{100} << 20});
  model.mutable_graph()->mutable_initializer(0)->set_raw_data(std::string(100 * kMiB, 'x'));
  const std::string bytes = model.SerializeAsString();
  EXPECT_LT(*onnx_memory(std::as_bytes(std::span(bytes))), 101 * kMiB);
  model.Clear();
  EXPECT_EQ(load_bytes(bytes).graph.outputs().size(), 1u);
}

TEST(onnx_security, expressions_that_would_explode) {
  onnx::ModelProto model = foreign_model();
  auto* shape = model.mutable_graph()
                    ->mutable_input(0)
                    ->mutable_type()
                    ->mutable_tensor_type()
                    ->mutable_shape();
  model.mutable_graph()->clear_output();
  std::string power = "(a + b + c + d + e)";
  for (int i = 0; i < 40; ++i) power += "*(a + b + c + d + e)";
  std::string product = "a";
  for (int i = 0; i < 500; ++i) product += "*a";
  for (const std::string& text : {power, product, std::string(100000, '('), std::string(1000, '-'),
                                  std::string(5000, 'a') + "*b"}) {
    shape->mutable_dim(0)->set_dim_param(text);
    const auto start = std::chrono::steady_clock::now();
    try {
      load_proto(model);
    } catch (const InvalidModelError&) {
      // Refused or taken as a symbol, but soon.
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    EXPECT_LT(seconds.count(), 5.0);
  }
}

}  // namespace
}  // namespace ortrain
