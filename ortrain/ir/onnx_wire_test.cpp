// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/onnx_wire.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>

#include "onnx/onnx-ml.pb.h"

namespace ortrain {
namespace {

std::string bytes(std::initializer_list<int> values) {
  return std::string(values.begin(), values.end());
}

onnx::ModelProto make_model() {
  onnx::ModelProto model;
  model.set_ir_version(11);
  model.set_producer_name("ortrain");
  auto* opset = model.add_opset_import();
  opset->set_domain("");
  opset->set_version(23);
  auto* graph = model.mutable_graph();
  auto* first = graph->add_node();
  graph->add_node()->set_op_type("Relu");
  first->set_op_type("Gemm");  // the pointer outlives the second add
  auto* attribute = first->add_attribute();
  attribute->set_name("alpha");
  attribute->set_type(onnx::AttributeProto::FLOAT);
  attribute->set_f(-0.5f);
  for (int64_t i : {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min()}) {
    attribute->add_ints(i);
  }
  auto* weight = graph->add_initializer();
  weight->set_data_type(onnx::TensorProto::FLOAT);
  weight->add_dims(2);
  weight->add_float_data(1.5f);
  weight->add_float_data(-2.5f);
  weight->set_raw_data("\0\xff", 2);
  auto* shape = graph->add_input()->mutable_type()->mutable_tensor_type()->mutable_shape();
  shape->add_dim()->set_dim_param("batch");
  shape->add_dim()->set_dim_value(128);
  return model;
}

TEST(OnnxWire, RoundTripKeepsEveryField) {
  const std::string data = make_model().SerializeAsString();
  EXPECT_EQ(data.size(), make_model().ByteSizeLong());
  onnx::ModelProto model;
  ASSERT_TRUE(model.ParseFromString(data));
  EXPECT_EQ(model.ir_version(), 11);
  EXPECT_TRUE(model.opset_import(0).has_domain());
  EXPECT_FALSE(model.has_doc_string());
  ASSERT_EQ(model.graph().node_size(), 2);
  EXPECT_EQ(model.graph().node(0).op_type(), "Gemm");
  const auto& attribute = model.graph().node(0).attribute(0);
  EXPECT_EQ(attribute.type(), onnx::AttributeProto::FLOAT);
  EXPECT_EQ(attribute.f(), -0.5f);
  EXPECT_EQ(attribute.ints(2), std::numeric_limits<int64_t>::min());
  const auto& weight = model.graph().initializer(0);
  EXPECT_EQ(weight.float_data(1), -2.5f);
  EXPECT_EQ(weight.raw_data(), std::string("\0\xff", 2));
  const auto& shape = model.graph().input(0).type().tensor_type().shape();
  EXPECT_EQ(shape.dim(0).value_case(), onnx::TensorShapeProto::Dimension::kDimParam);
  EXPECT_EQ(shape.dim(1).dim_value(), 128);
  EXPECT_EQ(model.SerializeAsString(), data);
}

TEST(OnnxWire, CopiesAreDeep) {
  const onnx::ModelProto model = make_model();
  onnx::ModelProto copy = model;
  copy.mutable_graph()->mutable_node(0)->set_op_type("MatMul");
  EXPECT_EQ(model.graph().node(0).op_type(), "Gemm");
}

TEST(OnnxWire, SettingOneOfClearsTheOther) {
  onnx::TensorShapeProto_Dimension dim;
  dim.set_dim_value(3);
  dim.set_dim_param("n");
  EXPECT_FALSE(dim.has_dim_value());
  EXPECT_EQ(dim.value_case(), onnx::TensorShapeProto_Dimension::kDimParam);
}

TEST(OnnxWire, ReadsPackedAndUnpackedAlike) {
  onnx::TensorProto packed;
  onnx::TensorProto unpacked;
  ASSERT_TRUE(packed.ParseFromString(bytes({0x0a, 0x02, 0x02, 0x03})));
  ASSERT_TRUE(unpacked.ParseFromString(bytes({0x08, 0x02, 0x08, 0x03})));
  EXPECT_EQ(packed.dims(), unpacked.dims());
  EXPECT_EQ(packed.dims(1), 3);
}

TEST(OnnxWire, SkipsUnknownFieldsAndEnumValues) {
  onnx::AttributeProto attribute;
  // Field 30 as a group that holds a varint, field 20 (type) with a value outside the enum.
  ASSERT_TRUE(attribute.ParseFromString(
      bytes({0xf3, 0x01, 0x08, 0x07, 0xf4, 0x01, 0xa0, 0x01, 0x7f, 0x0a, 0x01, 'x'})));
  EXPECT_FALSE(attribute.has_type());
  EXPECT_EQ(attribute.name(), "x");
}

TEST(OnnxWire, RefusesMalformedInput) {
  onnx::ModelProto model;
  EXPECT_FALSE(model.ParseFromString(bytes({0x00})));              // field number 0
  EXPECT_FALSE(model.ParseFromString(bytes({0x08})));              // no value
  EXPECT_FALSE(model.ParseFromString(bytes({0x12, 0x05, 'a'})));   // longer than the input
  EXPECT_FALSE(model.ParseFromString(bytes({0x0c})));              // end of a group never begun
  EXPECT_FALSE(model.ParseFromString(bytes({0x0a, 0x01, 0x01})));  // wrong wire type
  EXPECT_FALSE(model.ParseFromString(std::string(11, '\xff')));    // endless varint
  // A length of 2^64 - 1 must not wrap around.
  EXPECT_FALSE(model.ParseFromString(
      bytes({0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01})));
}

TEST(OnnxWire, EveryTruncationIsRefusedOrShorter) {
  const std::string data = make_model().SerializeAsString();
  for (size_t size = 0; size < data.size(); ++size) {
    onnx::ModelProto model;
    if (model.ParseFromArray(data.data(), size)) {
      EXPECT_LE(model.ByteSizeLong(), size);
    }
  }
}

TEST(OnnxWire, RefusesDeepNesting) {
  // TypeProto.sequence_type.elem_type and so on; each level adds two messages.
  onnx::TypeProto type;
  onnx::TypeProto* inner = &type;
  for (int i = 0; i < 49; ++i) inner = inner->mutable_sequence_type()->mutable_elem_type();
  onnx::TypeProto parsed;
  EXPECT_TRUE(parsed.ParseFromString(type.SerializeAsString()));
  for (int i = 0; i < 2; ++i) inner = inner->mutable_sequence_type()->mutable_elem_type();
  EXPECT_FALSE(parsed.ParseFromString(type.SerializeAsString()));
}

}  // namespace
}  // namespace ortrain
