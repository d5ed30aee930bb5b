// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Changes models message by message: what is left is a model still, wrong in one or two places.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "fuzz/answers.h"
#include "fuzz/byte_source.h"
#include "fuzz/targets.h"
#include "onnx/onnx-ml.pb.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::fuzz {
namespace {

constexpr size_t kMostElements = 64;

template <class T>
T* any_of(onnx::wire::RepeatedMessage<T>* items, Numbers& numbers) {
  if (items->empty()) return nullptr;
  return items->Mutable(static_cast<int>(numbers.below(static_cast<size_t>(items->size()))));
}

int64_t drawn_integer(Numbers& numbers) {
  switch (numbers.below(3)) {
    case 0:
      return numbers.extreme();
    case 1:
      return static_cast<int64_t>(numbers.below(9)) - 3;
    default:
      return static_cast<int64_t>(static_cast<uint64_t>(numbers.extreme()) + numbers.below(5) - 2);
  }
}

// One element more, less, or another one.
template <class Field, class Draw>
void change_list(Field* values, Numbers& numbers, const Draw& draw) {
  const size_t kind = numbers.below(4);
  if (values->empty() || kind == 0) {
    if (values->size() < kMostElements) {
      values->insert(values->begin() + static_cast<ptrdiff_t>(numbers.below(values->size() + 1)),
                     draw());
    }
  } else if (kind == 1) {
    values->erase(values->begin() + static_cast<ptrdiff_t>(numbers.below(values->size())));
  } else {
    (*values)[numbers.below(values->size())] = draw();
  }
}

class ModelMutator {
 public:
  ModelMutator(onnx::ModelProto& model, uint64_t seed)
      : graph_(*model.mutable_graph()), model_(model), numbers_(seed) {}

  void change() {
    const size_t edits = 1 + numbers_.below(3);
    for (size_t i = 0; i < edits; ++i) change_once();
  }

 private:
  void change_once() {
    switch (numbers_.below(12)) {
      case 0:
      case 1:
        return change_info(any_of(
            numbers_.below(3) == 0 ? graph_.mutable_output() : graph_.mutable_input(), numbers_));
      case 2:
        return change_tensor(any_of(graph_.mutable_initializer(), numbers_));
      case 3:
      case 4:
        return change_attribute();
      case 5:
      case 6:
        return change_operands();
      case 7:
        return change_operator();
      case 8:
        return add_node();
      case 9:
        return change_nodes();
      case 10:
        return change_roles();
      default:
        return change_opset();
    }
  }

  int32_t drawn_type() {
    constexpr int32_t kTypes[] = {1, 1, 2, 3, 4, 5, 6, 7, 7, 9, 10, 11, 12, 13, 16, 0, 8, 14, 99};
    return kTypes[numbers_.below(std::size(kTypes))];
  }

  // A name that is in use, mostly.
  std::string drawn_name() {
    std::vector<std::string> names{"", "y"};
    for (const auto& node : graph_.node()) {
      names.insert(names.end(), node.output().begin(), node.output().end());
    }
    for (const auto& input : graph_.input()) names.push_back(input.name());
    for (const auto& tensor : graph_.initializer()) names.push_back(tensor.name());
    return names[numbers_.below(names.size())];
  }

  void change_info(onnx::ValueInfoProto* info) {
    if (info == nullptr) return;
    auto* const type = info->mutable_type()->mutable_tensor_type();
    if (numbers_.below(6) == 0) return type->set_elem_type(drawn_type());
    auto* const dims = type->mutable_shape()->mutable_dim();
    if (dims->empty() || numbers_.below(6) == 0) {
      if (dims->size() < 8) dims->Add()->set_dim_value(drawn_integer(numbers_));
      return;
    }
    auto* const dim = any_of(dims, numbers_);
    constexpr const char* kSymbols[] = {"n", "m", "2*n", "n + 1", "n*m", "floor(n/2)", "-n"};
    if (numbers_.below(3) == 0) {
      dim->set_dim_param(kSymbols[numbers_.below(std::size(kSymbols))]);
    } else {
      dim->set_dim_value(drawn_integer(numbers_));
    }
  }

  void change_tensor(onnx::TensorProto* tensor) {
    if (tensor == nullptr) return;
    switch (numbers_.below(6)) {
      case 0:
        return tensor->set_data_type(drawn_type());
      case 1:
        return change_list(tensor->mutable_dims(), numbers_,
                           [&] { return drawn_integer(numbers_); });
      case 2: {
        std::string* const raw = tensor->mutable_raw_data();
        return raw->resize(numbers_.below(raw->size() + 9), '\1');
      }
      case 3: {
        // Integers of eight bytes, wherever they may lie: axes, shapes, indices.
        std::string* const raw = tensor->mutable_raw_data();
        if (raw->size() < 8) return;
        const int64_t value = drawn_integer(numbers_);
        std::memcpy(raw->data() + numbers_.below(raw->size() / 8) * 8, &value, 8);
        return;
      }
      case 4:
        return change_list(tensor->mutable_int64_data(), numbers_,
                           [&] { return drawn_integer(numbers_); });
      default:
        return change_list(tensor->mutable_float_data(), numbers_,
                           [&] { return static_cast<float>(drawn_integer(numbers_)); });
    }
  }

  void change_attribute() {
    onnx::NodeProto* const node = any_of(graph_.mutable_node(), numbers_);
    if (node == nullptr) return;
    auto* const attributes = node->mutable_attribute();
    const OpDef* const def = op_registry().find(node->domain(), node->op_type());
    if (attributes->empty() || numbers_.below(4) == 0) {
      if (def == nullptr || def->attrs.empty() || attributes->size() > 12) return;
      auto* const added = attributes->Add();
      added->set_name(def->attrs[numbers_.below(def->attrs.size())].name);
      added->set_type(numbers_.below(2) == 0 ? onnx::AttributeProto::INT
                                             : onnx::AttributeProto::INTS);
      added->set_i(drawn_integer(numbers_));
      for (size_t i = numbers_.below(5); i > 0; --i) added->add_ints(drawn_integer(numbers_));
      return;
    }
    auto* const attribute = any_of(attributes, numbers_);
    switch (attribute->type()) {
      case onnx::AttributeProto::INT:
        return attribute->set_i(drawn_integer(numbers_));
      case onnx::AttributeProto::INTS:
        return change_list(attribute->mutable_ints(), numbers_,
                           [&] { return drawn_integer(numbers_); });
      case onnx::AttributeProto::FLOAT:
        return attribute->set_f(static_cast<float>(drawn_integer(numbers_)) / 3);
      case onnx::AttributeProto::FLOATS:
        return change_list(attribute->mutable_floats(), numbers_,
                           [&] { return static_cast<float>(drawn_integer(numbers_)); });
      case onnx::AttributeProto::STRING: {
        // Words that choose a mode somewhere.
        constexpr const char* kWords[] = {
            "",        "mean",    "sum",      "none",    "linear",     "nearest",    "cubic",
            "reflect", "edge",    "constant", "wrap",    "SAME_UPPER", "SAME_LOWER", "VALID",
            "NOTSET",  "reverse", "forward",  "Sigmoid", "ij,jk->ik",  "add",        "tanh"};
        return attribute->set_s(kWords[numbers_.below(std::size(kWords))]);
      }
      case onnx::AttributeProto::TENSOR:
        return change_tensor(attribute->mutable_t());
      default:
        return attribute->set_type(onnx::AttributeProto::INT);
    }
  }

  void change_operands() {
    onnx::NodeProto* const node = any_of(graph_.mutable_node(), numbers_);
    if (node == nullptr) return;
    auto* const inputs = node->mutable_input();
    if (inputs->size() > 1 && numbers_.below(2) == 0) {
      return std::swap((*inputs)[numbers_.below(inputs->size())],
                       (*inputs)[numbers_.below(inputs->size())]);
    }
    if (numbers_.below(5) > 0) {
      return change_list(inputs, numbers_, [&] { return drawn_name(); });
    }
    change_list(node->mutable_output(), numbers_, [&] {
      return numbers_.below(4) == 0 ? "" : "o" + std::to_string(numbers_.below(1000));
    });
  }

  const OpDef& drawn_operator() {
    static const std::vector<const OpDef*> all = [] {
      std::vector<const OpDef*> found = op_registry().all();
      const std::vector<const OpDef*> composites = op_registry().composites();
      found.insert(found.end(), composites.begin(), composites.end());
      return found;
    }();
    return *all[numbers_.below(all.size())];
  }

  void change_operator() {
    onnx::NodeProto* const node = any_of(graph_.mutable_node(), numbers_);
    if (node == nullptr) return;
    const OpDef& def = drawn_operator();
    node->set_op_type(def.name);
    node->set_domain(def.domain);
  }

  // A node that reads what is there, and whose result is an output.
  void add_node() {
    if (graph_.node_size() > 24) return;
    const OpDef& def = drawn_operator();
    onnx::NodeProto* const node = graph_.add_node();
    node->set_op_type(def.name);
    node->set_domain(def.domain);
    for (size_t i = 0; i < std::max<size_t>(1, def.inputs.size()); ++i) {
      node->add_input(drawn_name());
    }
    const std::string name = "o" + std::to_string(numbers_.below(100000));
    node->add_output(name);
    graph_.add_output()->set_name(name);
  }

  void change_nodes() {
    if (graph_.node().empty()) return;
    const auto at = static_cast<int>(numbers_.below(static_cast<size_t>(graph_.node_size())));
    if (numbers_.below(2) == 0) {
      // The results of the node are read by an output, or by nobody.
      const auto& outputs = graph_.node(at).output();
      if (!outputs.empty()) graph_.add_output()->set_name(outputs[0]);
      return;
    }
    onnx::GraphProto kept = graph_;
    graph_.mutable_node()->clear();
    for (int i = 0; i < kept.node_size(); ++i) {
      if (i != at) *graph_.add_node() = kept.node(i);
    }
  }

  // What the engine's own files say about inputs and outputs.
  void change_roles() {
    auto* const properties = model_.mutable_metadata_props();
    auto* const property = any_of(properties, numbers_);
    if (property == nullptr) return;
    std::string value = property->value();
    if (value.empty()) return;
    value[numbers_.below(value.size())] = static_cast<char>(32 + numbers_.below(95));
    property->set_value(value);
  }

  void change_opset() {
    auto* const import = any_of(model_.mutable_opset_import(), numbers_);
    if (import == nullptr) return;
    import->set_version(static_cast<int64_t>(numbers_.below(30)));
  }

  onnx::GraphProto& graph_;
  onnx::ModelProto& model_;
  Numbers numbers_;
};

}  // namespace

size_t mutate_onnx(uint8_t* data, size_t size, size_t limit, uint64_t seed) {
  onnx::ModelProto model;
  bool is_model = false;
  accepted([&] { is_model = model.ParseFromArray(data, static_cast<int>(size)); });
  if (!is_model || !model.has_graph()) return 0;
  ModelMutator(model, seed).change();
  const std::string changed = model.SerializeAsString();
  if (changed.empty() || changed.size() > limit) return 0;
  std::memcpy(data, changed.data(), changed.size());
  return changed.size();
}

}  // namespace ortrain::fuzz
