// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Names and texts of files: UTF-8, and nothing that steers a terminal or begins a line.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "ortrain/base/printable.h"
#include "ortrain/ir/onnx_model_test.h"
#include "ortrain/ir/text.h"

namespace ortrain {
namespace {

using ::testing::HasSubstr;

constexpr std::string_view kName = "NAME";

// A model in which everything that can have a name has one with NAME in it.
std::string named_model() {
  onnx::ModelProto model = foreign_model();
  model.set_producer_name("NAME.producer");
  auto* about = model.add_metadata_props();
  about->set_key("NAME.key");
  about->set_value("NAME.value");
  onnx::GraphProto& graph = *model.mutable_graph();
  graph.set_name("NAME.graph");
  graph.clear_node();
  graph.clear_input();
  graph.clear_output();
  add_value(graph.add_input(), "NAME.x", 1, {2});
  auto* extent = graph.mutable_input(0)->mutable_type()->mutable_tensor_type()->mutable_shape();
  extent->mutable_dim(0)->set_dim_param("NAME_extent");
  add_initializer(model, "NAME.w", 1, {1})->add_float_data(1);
  add_node(model, "Add", {"NAME.x", "NAME.w"}, {"NAME.h"})->set_name("NAME.layer");
  add_node(model, "Identity", {"NAME.h"}, {"NAME.y"});
  add_value(graph.add_value_info(), "NAME.h", 1, {2});
  graph.mutable_value_info(0)->mutable_type()->mutable_tensor_type()->clear_shape();
  graph.add_output()->set_name("NAME.y");
  return model.SerializeAsString();
}

// What loading says of the model in which `with` stands in place of the n-th NAME; "" if it is
// taken.
std::string said(const std::string& model, size_t at, const std::string& with) {
  std::string changed = model;
  changed.replace(at, kName.size(), with);
  try {
    load_bytes(changed);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(OnnxNames, AreUtf8) {
  const std::string model = named_model();
  load_bytes(model);
  int places = 0;
  for (size_t at = model.find(kName); at != std::string::npos; at = model.find(kName, at + 1)) {
    const std::string message = said(model, at, "N\xff.E");
    EXPECT_THAT(message, HasSubstr("is no UTF-8: 'N\\xff.E"));
    ++places;
  }
  EXPECT_GE(places, 14);
}

TEST(OnnxNames, ThoseThatCannotBeShownAreRefused) {
  const std::string model = named_model();
  for (const char* with : {"N\x1b[J", "N\n.E", "\xc2\x9b.E", "\xe2\x80\xae_"}) {
    std::string changed = model;
    for (size_t at = changed.find(kName); at != std::string::npos; at = changed.find(kName)) {
      changed.replace(at, kName.size(), with);
    }
    try {
      load_bytes(changed);
      ADD_FAILURE() << printable(with) << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(printable(error.what()), error.what());
    }
  }
}

TEST(OnnxNames, EachOfTheGraphIsRefusedByItself) {
  const std::string model = named_model();
  for (const char* of : {"NAME.graph", "NAME.layer"}) {
    const size_t at = model.find(of);
    ASSERT_NE(at, std::string::npos);
    EXPECT_NE(said(model, at, "N\x1b[J"), "") << of;
  }
}

TEST(OnnxNames, OfWhatIsNoExpressionAnExtentIsNotMade) {
  std::string model = named_model();
  model.replace(model.find("NAME_extent"), kName.size(), "N\x1b[J");
  const Graph graph = load_bytes(model).graph;
  const std::string shape = shape_str(graph.value(graph.inputs()[0].value).shape);
  EXPECT_EQ(printable(shape), shape);
}

TEST(OnnxNames, DescriptionsMayBeOfAnyEncoding) {
  onnx::ModelProto model = foreign_model();
  model.mutable_graph()->set_doc_string(
      "gr\xf6\xdf"
      "er");
  load_proto(model);
}

TEST(OnnxNames, OfBytesThatAreNoTextAnAttributeIsNotMade) {
  onnx::ModelProto model = foreign_model();
  auto* node = model.mutable_graph()->mutable_node(0);
  add_attribute(node, "name", onnx::AttributeProto::STRING)->set_s("\xff");
  EXPECT_THAT(refusal<UnsupportedError>(model), HasSubstr("no UTF-8"));
  node->mutable_attribute(0)->set_type(onnx::AttributeProto::STRINGS);
  node->mutable_attribute(0)->add_strings("\xff");
  EXPECT_THAT(refusal<UnsupportedError>(model), HasSubstr("no UTF-8"));
}

TEST(OnnxNames, InTheTextFormToo) {
  for (const char* name : {R"("\xff")", R"("\x1b[2J")", "\"\xff\"", R"("a\nb")"}) {
    EXPECT_THROW(parse_graph(str("graph (float32[2] x) => (", name, ") { ", name, " = Relu(x) }")),
                 InvalidModelError)
        << printable(name);
  }
}

}  // namespace
}  // namespace ortrain
