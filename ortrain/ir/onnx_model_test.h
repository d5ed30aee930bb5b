// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "onnx/onnx-ml.pb.h"
#include "ortrain/base/error.h"
#include "ortrain/ir/onnx_io.h"
#include "ortrain/ir/sample_registry_test.h"

namespace ortrain {

// A folder that goes away with the test.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "ortrain-XXXXXX").string();
    EXPECT_NE(::mkdtemp(pattern.data()), nullptr);
    path_ = pattern;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path write(const std::string& name, std::string_view text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return path_ / name;
  }
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      result.push_back(entry.path().filename().string());
    }
    std::sort(result.begin(), result.end());
    return result;
  }

 private:
  std::filesystem::path path_;
};

inline OnnxModel load_bytes(const std::string& bytes, const LoadOptions& options = {}) {
  return load_onnx_model_bytes(std::as_bytes(std::span(bytes)), options, sample_registry());
}

inline OnnxModel load_proto(const onnx::ModelProto& model, const LoadOptions& options = {}) {
  return load_bytes(model.SerializeAsString(), options);
}

// The message of the error that loading throws.
template <typename ErrorType>
std::string refusal(const onnx::ModelProto& model, const LoadOptions& options = {}) {
  try {
    load_proto(model, options);
  } catch (const ErrorType& error) {
    return error.what();
  }
  ADD_FAILURE() << "the model was accepted";
  return "";
}

inline void add_value(onnx::ValueInfoProto* info, const std::string& name, int dtype,
                      const std::vector<int64_t>& dims) {
  info->set_name(name);
  auto* type = info->mutable_type()->mutable_tensor_type();
  type->set_elem_type(dtype);
  type->mutable_shape();
  for (int64_t dim : dims) type->mutable_shape()->add_dim()->set_dim_value(dim);
}

inline onnx::NodeProto* add_node(onnx::ModelProto& model, const std::string& op,
                                 const std::vector<std::string>& inputs,
                                 const std::vector<std::string>& outputs) {
  onnx::NodeProto* node = model.mutable_graph()->add_node();
  node->set_op_type(op);
  node->set_name("layer/" + op);
  for (const std::string& input : inputs) node->add_input(input);
  for (const std::string& output : outputs) node->add_output(output);
  return node;
}

inline onnx::AttributeProto* add_attribute(onnx::NodeProto* node, const std::string& name,
                                           onnx::AttributeProto::AttributeType type) {
  onnx::AttributeProto* attribute = node->add_attribute();
  attribute->set_name(name);
  attribute->set_type(type);
  return attribute;
}

inline onnx::TensorProto* add_initializer(onnx::ModelProto& model, const std::string& name,
                                          int dtype, const std::vector<int64_t>& dims) {
  onnx::TensorProto* tensor = model.mutable_graph()->add_initializer();
  tensor->set_name(name);
  tensor->set_data_type(dtype);
  for (int64_t dim : dims) tensor->add_dims(dim);
  return tensor;
}

// y = Softmax(x), opset 17, with float32 x[2, 3].
inline onnx::ModelProto foreign_model() {
  onnx::ModelProto model;
  model.set_ir_version(8);
  model.set_producer_name("test");
  auto* opset = model.add_opset_import();
  opset->set_domain("");
  opset->set_version(17);
  model.mutable_graph()->set_name("g");
  add_value(model.mutable_graph()->add_input(), "x", 1, {2, 3});
  add_node(model, "Softmax", {"x"}, {"y"});
  add_value(model.mutable_graph()->add_output(), "y", 1, {2, 3});
  return model;
}

// The same with y = Add(x, w) in place of the Softmax and an empty initializer w of that type.
inline onnx::ModelProto model_with_initializer(int dtype, const std::vector<int64_t>& dims) {
  onnx::ModelProto model = foreign_model();
  model.mutable_graph()->clear_node();
  model.mutable_graph()->clear_output();
  add_node(model, "Identity", {"w"}, {"y"});
  model.mutable_graph()->add_output()->set_name("y");
  add_initializer(model, "w", dtype, dims);
  return model;
}

}  // namespace ortrain
