// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <new>
#include <set>
#include <sstream>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "onnx/onnx-ml.pb.h"
#include "ortrain/base/error.h"
#include "ortrain/ir/confined_file.h"
#include "ortrain/ir/graph_assembler.h"
#include "ortrain/ir/onnx_attributes.h"
#include "ortrain/ir/onnx_dims.h"
#include "ortrain/ir/onnx_external_data.h"
#include "ortrain/ir/onnx_io.h"
#include "ortrain/ir/onnx_memory.h"
#include "ortrain/ir/onnx_metadata.h"
#include "ortrain/ir/onnx_subgraphs.h"
#include "ortrain/ir/onnx_tensor.h"
#include "ortrain/ir/text_scanner.h"

namespace ortrain {
namespace {

namespace metadata = onnx_metadata;

constexpr int64_t kMinIrVersion = 3;
constexpr int64_t kMaxIrVersion = 14;
constexpr int64_t kOrtrainOpset = 1;
// Nodes take some thirty times their bytes.
constexpr uint64_t kMemoryFactor = 32;
constexpr uint64_t kMemorySlack = uint64_t{64} << 20;

using Metadata = onnx::wire::RepeatedMessage<onnx::StringStringEntryProto>;

// A model that inference refuses is a wrong model.
template <typename Body>
auto as_invalid_model(Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const ShapeError& error) {
    throw InvalidModelError(error.what());
  } catch (const DTypeError& error) {
    throw InvalidModelError(error.what());
  } catch (const IndexError& error) {
    throw InvalidModelError(error.what());
  }
}

template <typename Table>
auto role_of(const Table& table, const Metadata& entries) {
  const std::string& word = metadata_value(entries, metadata::kRole);
  if (word.empty()) return table.front().second;
  for (const auto& [known, role] : table) {
    if (word == known) return role;
  }
  throw InvalidModelError(str("the role ", quoted_text(word), " is not known"));
}

const onnx::TypeProto_Tensor& tensor_type(const onnx::TypeProto& type) {
  switch (type.value_case()) {
    case onnx::TypeProto::kTensorType:
      return type.tensor_type();
    case onnx::TypeProto::VALUE_NOT_SET:
      throw InvalidModelError("it has no type");
    default:
      throw UnsupportedError("it is no dense tensor");
  }
}

std::string domain_of(const std::string& domain) { return domain == "ai.onnx" ? "" : domain; }

std::string frame_of(const onnx::NodeProto& node) {
  Node named;
  named.op = node.op_type();
  named.domain = domain_of(node.domain());
  named.name = node.name();
  if (named.name.empty() && node.output_size() > 0) named.name = "-> " + node.output(0);
  return Graph::context(named);
}

class ModelLoader {
 public:
  ModelLoader(onnx::ModelProto model, const LoadOptions& options, const OpRegistry& registry)
      : model_(std::move(model)),
        proto_(*model_.mutable_graph()),
        options_(options),
        external_(options.external_data_directory, options.allow_links),
        assembler_(registry),
        subgraphs_(assembler_, external_, [this](onnx::NodeProto& node) { load_node(node); }) {}

  OnnxModel load() {
    return as_invalid_model([&] { return load_checked(); });
  }

 private:
  OnnxModel load_checked() {
    check_model();
    const bool unnamed = !metadata_value(proto_.metadata_props(), metadata::kUnnamed).empty();
    if (!unnamed) assembler_.graph().name = proto_.name();
    index_initializers();
    load_inputs();
    load_initializers();
    for (int i = 0; i < proto_.node_size(); ++i) load_node(*proto_.mutable_node(i));
    load_outputs();
    for (const onnx::ValueInfoProto& info : proto_.value_info()) check_info(info);
    for (const onnx::ValueInfoProto& info : proto_.output()) check_info(info);
    return {assembler_.finish(), std::move(values_)};
  }

  void check_model() {
    const int64_t version = model_.ir_version();
    if (version <= 0) throw InvalidModelError("the model has no IR version");
    if (version < kMinIrVersion || version > kMaxIrVersion) {
      throw UnsupportedError(str("IR version ", version, "; ", kMinIrVersion, " to ", kMaxIrVersion,
                                 " are supported"));
    }
    for (const onnx::OperatorSetIdProto& import : model_.opset_import()) {
      const std::string domain = domain_of(import.domain());
      auto [entry, fresh] = opsets_.emplace(domain, import.version());
      if (!fresh && entry->second != import.version()) {
        throw InvalidModelError(str("two opsets of the domain '", domain, "' are imported"));
      }
      const bool standard = domain.empty();
      const int64_t newest = standard ? kNewestOnnxOpset : kOrtrainOpset;
      if ((standard || domain == kOrtrainDomain) && import.version() > newest) {
        throw UnsupportedError(str("opset ", import.version(), " of the domain '", domain,
                                   "'; opsets up to ", newest, " are supported"));
      }
      if (import.version() <= 0) {
        throw InvalidModelError(str("opset ", import.version(), " of the domain '", domain, "'"));
      }
    }
    if (model_.functions_size() > 0) {
      throw UnsupportedError(
          str("the model has functions: ", quoted_text(model_.functions(0).name())));
    }
    if (model_.training_info_size() > 0) throw UnsupportedError("the model has training_info");
    if (proto_.sparse_initializer_size() > 0) {
      throw UnsupportedError(
          str("sparse initializer ", quoted_text(proto_.sparse_initializer(0).values().name())));
    }
  }

  void index_initializers() {
    for (int i = 0; i < proto_.initializer_size(); ++i) {
      const std::string& name = proto_.initializer(i).name();
      if (!initializers_.emplace(name, i).second) {
        throw InvalidModelError(str("two initializers have the name ", quoted_text(name)));
      }
    }
    for (const std::string& name : options_.parameter_names) {
      if (!initializers_.contains(name)) {
        throw InvalidModelError(str("the model has no initializer ", quoted_text(name)));
      }
    }
  }

  TensorData take_initializer(const std::string& name) {
    onnx::TensorProto& tensor = *proto_.mutable_initializer(initializers_.at(name));
    loaded_.insert(name);
    return with_context(str("initializer ", quoted_text(name), ": "),
                        [&] { return tensor_from_onnx(tensor, external_); });
  }

  void load_inputs() {
    ExtentReader extents(proto_);
    for (const onnx::ValueInfoProto& info : proto_.input()) {
      with_context(str("input ", quoted_text(info.name()), ": "), [&] {
        const bool has_contents = initializers_.contains(info.name());
        const InputRole role = role_of(kInputRoles, info.metadata_props());
        // Before IR version 4 every initializer stood among the inputs as well.
        if (has_contents && role == InputRole::user) {
          if (!listed_initializers_.emplace(info.name(), &info).second) {
            throw InvalidModelError("it is listed twice");
          }
          return;
        }
        GraphInput input;
        input.role = role;
        input.target = metadata_value(info.metadata_props(), metadata::kTarget);
        input.requires_grad =
            metadata_value(info.metadata_props(), metadata::kRequiresGrad) == metadata::kTrue;
        const std::string target = input.target;
        add_input(info, extents, std::move(input));
        if (!has_contents) return;
        TensorData data = take_initializer(info.name());
        check_contents(assembler_.graph().value(assembler_.find(info.name())), data);
        keep_value(target, std::move(data));
      });
    }
  }

  void add_input(const onnx::ValueInfoProto& info, ExtentReader& extents, GraphInput input) {
    const onnx::TypeProto_Tensor& type = tensor_type(info.type());
    const DType dtype = dtype_from_model(type.elem_type());
    if (!type.has_shape()) throw UnsupportedError("its rank is not known");
    Shape shape;
    for (const auto& extent : type.shape().dim()) {
      shape.push_back(extents.read(extent, str(info.name(), ".d", shape.size())));
    }
    assembler_.add_input(std::move(input), info.name(), dtype, std::move(shape));
  }

  static void check_contents(const Value& value, const TensorData& data) {
    bool fits = value.dtype == data.dtype() && value.shape.size() == data.dims().size();
    for (size_t i = 0; fits && i < value.shape.size(); ++i) {
      fits = !value.shape[i].is_constant() || value.shape[i].is(data.dims()[i]);
    }
    if (!fits) {
      throw InvalidModelError(str("it is ", name_of(value.dtype), shape_str(value.shape),
                                  ", its initializer is ", name_of(data.dtype()),
                                  dims_str(data.dims())));
    }
  }

  void keep_value(const std::string& target, TensorData data) {
    const auto [held, fresh] = values_.emplace(target, data);
    if (!fresh && !held->second.equals(data)) {
      throw InvalidModelError(
          str("another input with the target ", quoted_text(target), " has other contents"));
    }
  }

  // Inputs of operators that say what to do, and statistics that no gradient trains.
  static bool holds_settings(std::string_view op, int input) {
    if (op == "BatchNormalization") return input == 3 || input == 4;
    if (op == "Clip" || op == "Dropout" || op == "Resize") return input == 1 || input == 2;
    if (op == "OneHot" || op == "Pad") return input == 2;
    return op == "Upsample" && input == 1;
  }

  void find_settings() {
    for (const onnx::NodeProto& node : proto_.node()) {
      for (int i = 0; i < node.input_size(); ++i) {
        if (holds_settings(node.op_type(), i)) settings_.insert(node.input(i));
      }
    }
  }

  bool becomes_parameter(const std::string& name, DType dtype, const Dims& dims) const {
    if (options_.initializers == LoadOptions::Initializers::weights) {
      if (!trained_.empty()) return is_float(dtype) && trained_.contains(name);
      return is_float(dtype) && !dims.empty() && !settings_.contains(name);
    }
    if (options_.initializers != LoadOptions::Initializers::parameters) return false;
    const std::vector<std::string>& chosen = options_.parameter_names;
    if (chosen.empty()) return is_float(dtype);
    return std::find(chosen.begin(), chosen.end(), name) != chosen.end();
  }

  void load_initializers() {
    if (options_.initializers == LoadOptions::Initializers::weights) {
      find_settings();
      std::istringstream names(metadata_value(proto_.metadata_props(), metadata::kTrained));
      for (std::string name; std::getline(names, name);) trained_.insert(name);
    }
    for (int i = 0; i < proto_.initializer_size(); ++i) {
      const std::string name = proto_.initializer(i).name();
      if (loaded_.contains(name)) continue;
      TensorData data = take_initializer(name);
      const bool parameter = becomes_parameter(name, data.dtype(), data.dims());
      with_context("initializer: ", [&] {
        if (!parameter) {
          assembler_.add_constant(std::move(data), name);
          return;
        }
        assembler_.add_input({kNoValue, InputRole::parameter, name, is_float(data.dtype())}, name,
                             data.dtype(), to_shape(data.dims()));
        keep_value(name, std::move(data));
      });
    }
    for (const auto& [name, info] : listed_initializers_) check_info(*info);
  }

  void load_node(onnx::NodeProto& proto) {
    NamedNode node;
    const OpDef* meaning = nullptr;
    const std::string frame = frame_of(proto);
    if (SubgraphInliner::handles(proto)) {
      with_context(frame, [&] {
        const auto opset = opsets_.find("");
        if (opset == opsets_.end())
          throw InvalidModelError("no opset of the domain '' is imported");
        for (const std::string& input : proto.input()) find_input(input);
        subgraphs_.load(proto, opset->second);
      });
      return;
    }
    with_context(frame, [&] {
      if (proto.op_type().empty()) throw InvalidModelError("a node has no operator");
      if (!proto.overload().empty()) throw UnsupportedError("an overload of a function");
      node.op = proto.op_type();
      node.domain = domain_of(proto.domain());
      node.name = proto.name();
      meaning = meaning_of(node);
      node.attributes = attributes_from_onnx(proto, external_);
      if (meaning != nullptr) {
        check_attributes(node, *meaning);
        resolve_value_names(node, *meaning);
      }
      const std::string& phase = metadata_value(proto.metadata_props(), metadata::kPhase);
      if (!phase.empty() && phase != metadata::kBackward) {
        throw InvalidModelError(str("the phase ", quoted_text(phase), " is not known"));
      }
      node.phase = phase.empty() ? Phase::forward : Phase::backward;
      const std::string& checkpoint = metadata_value(proto.metadata_props(), metadata::kCheckpoint);
      if (!checkpoint.empty()) {
        const std::optional<int> number = checkpoint_number(checkpoint);
        if (!number || node.phase == Phase::backward) {
          throw InvalidModelError(str("the checkpoint ", quoted_text(checkpoint),
                                      " is no number from 1, or not of a forward node"));
        }
        node.checkpoint = *number;
      }
      for (const std::string& input : proto.input()) node.inputs.push_back(find_input(input));
      node.outputs.assign(proto.output().begin(), proto.output().end());
      if (meaning != nullptr) check_input_types(node, *meaning);
    });
    if (is_alias(proto)) {
      with_context(frame, [&] { assembler_.add_alias(node.outputs[0], node.inputs[0]); });
    } else if (node.domain.empty() && node.op == "Constant") {
      with_context(frame, [&] { load_constant(std::move(node)); });
    } else {
      assembler_.add_node(std::move(node), meaning);
    }
  }

  // The meaning that the file's opset gives an operator; null for a constant.
  const OpDef* meaning_of(const NamedNode& node) const {
    auto opset = opsets_.find(node.domain);
    if (opset == opsets_.end()) {
      throw InvalidModelError(str("no opset of the domain '", node.domain, "' is imported"));
    }
    if (node.domain.empty() && node.op == "Constant") return nullptr;
    const OpDef& def = assembler_.registry().at(node.domain, node.op, opset->second);
    if (!def.in_files)
      throw UnsupportedError("it runs functions of a process, which no file names");
    return &def;
  }

  // Names of the file become those of the graph, which may have others.
  void resolve_value_names(NamedNode& node, const OpDef& def) const {
    const auto resolve = [&](std::string& name) {
      name = assembler_.graph().value(find_input(name)).name;
    };
    for (auto& [attribute, value] : node.attributes) {
      if (!def.names_values(attribute)) continue;
      if (auto* name = std::get_if<std::string>(&value)) resolve(*name);
      if (auto* names = std::get_if<std::vector<std::string>>(&value)) {
        for (std::string& name : *names) resolve(name);
      }
    }
  }

  // An attribute of a later opset is no mistake of the model.
  void check_attributes(const NamedNode& node, const OpDef& def) const {
    if (!node.domain.empty() || opsets_.at("") <= kOnnxOpset) return;
    for (const auto& [name, attribute] : node.attributes) {
      if (def.find_attribute(name) == nullptr) {
        throw UnsupportedError(str("attribute '", name, "' of opset ", opsets_.at("")));
      }
    }
  }

  // Our operators take fewer element types than ONNX's: that is no mistake of the model.
  void check_input_types(const NamedNode& node, const OpDef& def) const {
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      const FormalValue* formal = def.formal_input(i);
      if (node.inputs[i] == kNoValue || formal == nullptr) continue;
      auto variable = def.types.find(formal->type);
      const DType dtype = assembler_.graph().value(node.inputs[i]).dtype;
      if (variable != def.types.end() && !variable->second.contains(dtype)) {
        throw UnsupportedError(str("input '", formal->name, "' of type ", name_of(dtype)));
      }
    }
  }

  ValueId find_input(const std::string& name) const {
    if (name.empty()) return kNoValue;
    const ValueId value = assembler_.find(name);
    if (value != kNoValue) return value;
    for (const onnx::NodeProto& node : proto_.node()) {
      const auto& outputs = node.output();
      if (std::find(outputs.begin(), outputs.end(), name) != outputs.end()) {
        throw InvalidModelError(str("input ", quoted_text(name),
                                    " is made by a later node: the graph has a cycle, or is not "
                                    "in order"));
      }
    }
    throw InvalidModelError(str("input ", quoted_text(name), " is made by nothing"));
  }

  static bool is_alias(const onnx::NodeProto& node) {
    return node.op_type() == "Identity" && node.domain().empty() && node.input_size() == 1 &&
           node.output_size() == 1 && !node.input(0).empty() && node.attribute_size() == 0 &&
           !metadata_value(node.metadata_props(), metadata::kAlias).empty();
  }

  void load_constant(NamedNode node) {
    if (!node.inputs.empty() || node.outputs.size() != 1 || node.attributes.size() != 1) {
      throw InvalidModelError("a constant has one output and one attribute");
    }
    auto& [name, attribute] = *node.attributes.begin();
    assembler_.add_constant(constant_from(name, std::move(attribute)), node.outputs[0]);
  }

  static TensorData constant_from(const std::string& name, Attribute attribute) {
    const std::pair<std::string_view, size_t> kinds[] = {
        {"value_int", 0},    {"value_float", 1},   {"value_string", 2}, {"value_ints", 3},
        {"value_floats", 4}, {"value_strings", 5}, {"value", 6}};
    const bool fits = std::any_of(std::begin(kinds), std::end(kinds), [&](const auto& kind) {
      return kind.first == name && kind.second == attribute.index();
    });
    if (!fits) throw InvalidModelError(str("attribute ", quoted_text(name), " of a wrong kind"));
    if (const auto* i = std::get_if<int64_t>(&attribute)) {
      return TensorData::from_values(DType::i64, {}, std::vector<int64_t>{*i});
    }
    if (const auto* is = std::get_if<std::vector<int64_t>>(&attribute)) {
      return TensorData::int64s(*is);
    }
    if (const auto* f = std::get_if<double>(&attribute)) {
      return TensorData::from_values(DType::f32, {}, std::vector<float>{static_cast<float>(*f)});
    }
    if (const auto* fs = std::get_if<std::vector<double>>(&attribute)) {
      const std::vector<float> values(fs->begin(), fs->end());
      return TensorData::from_values(DType::f32, {static_cast<int64_t>(values.size())}, values);
    }
    if (auto* tensor = std::get_if<TensorData>(&attribute)) return std::move(*tensor);
    throw UnsupportedError("a constant of strings");
  }

  void load_outputs() {
    std::unordered_set<std::string> names;
    for (const onnx::ValueInfoProto& info : proto_.output()) {
      with_context(str("output ", quoted_text(info.name()), ": "), [&] {
        if (!names.insert(info.name()).second) throw InvalidModelError("it is listed twice");
        GraphOutput output;
        output.value = assembler_.find(info.name());
        if (output.value == kNoValue) throw InvalidModelError("nothing makes it");
        output.name = output_name(info);
        output.role = role_of(kOutputRoles, info.metadata_props());
        output.target = metadata_value(info.metadata_props(), metadata::kTarget);
        assembler_.graph().add_output(std::move(output));
      });
    }
  }

  static std::string output_name(const onnx::ValueInfoProto& info) {
    for (const onnx::StringStringEntryProto& entry : info.metadata_props()) {
      if (entry.key() == metadata::kOutputName) return entry.value();
    }
    return info.name();
  }

  // What the file says of a value must not contradict what is inferred.
  void check_info(const onnx::ValueInfoProto& info) const {
    const ValueId id = assembler_.find(info.name());
    // Tools that remove nodes leave the infos of their values behind.
    if (id == kNoValue || info.type().value_case() == onnx::TypeProto::VALUE_NOT_SET) return;
    with_context(str("value ", quoted_text(info.name()), ": "), [&] {
      const Value& value = assembler_.graph().value(id);
      const onnx::TypeProto_Tensor& type = tensor_type(info.type());
      bool fits = type.elem_type() == 0 || dtype_from_model(type.elem_type()) == value.dtype;
      std::string stated = onnx::TensorProto::DataType_Name(type.elem_type());
      if (type.has_shape()) {
        const int rank = type.shape().dim_size();
        fits = fits && static_cast<size_t>(rank) == value.shape.size();
        stated += "[";
        for (int i = 0; i < rank; ++i) {
          const auto& extent = type.shape().dim(i);
          stated += i > 0 ? ", " : "";
          stated += extent.has_dim_value() ? str(extent.dim_value()) : extent.dim_param();
          if (!fits || !extent.has_dim_value()) continue;
          const Dim& inferred = value.shape[static_cast<size_t>(i)];
          fits = !inferred.is_constant() || inferred.is(extent.dim_value());
        }
        stated += "]";
      }
      if (fits) return;
      throw InvalidModelError(str("the model says ", stated, ", inferred is ", name_of(value.dtype),
                                  shape_str(value.shape)));
    });
  }

  onnx::ModelProto model_;
  onnx::GraphProto& proto_;
  const LoadOptions& options_;
  ExternalData external_;
  GraphAssembler assembler_;
  SubgraphInliner subgraphs_;
  std::map<std::string, int64_t> opsets_;
  std::unordered_map<std::string, int> initializers_;
  std::unordered_set<std::string> loaded_;
  std::set<std::string> settings_;
  std::set<std::string> trained_;  // what the file says of it, where it does
  std::map<std::string, const onnx::ValueInfoProto*> listed_initializers_;
  std::map<std::string, TensorData> values_;
};

onnx::ModelProto parse_model(std::span<const std::byte> bytes, const LoadOptions& options) {
  if (bytes.empty()) throw InvalidModelError("the model is empty");
  const std::optional<uint64_t> needed = onnx_memory(bytes);
  if (!needed) throw InvalidModelError("the bytes are no ONNX model");
  const uint64_t limit =
      options.memory_limit > 0 ? options.memory_limit : kMemoryFactor * bytes.size() + kMemorySlack;
  if (*needed + bytes.size() > limit) {
    throw UnsupportedError(str("the model has ", bytes.size(), " bytes and would take ",
                               *needed + bytes.size(), " in memory, the limit is ", limit,
                               "; LoadOptions::memory_limit sets another"));
  }
  onnx::ModelProto model;
  if (!model.ParseFromArray(bytes.data(), bytes.size())) {
    throw InvalidModelError("the bytes are no ONNX model");
  }
  if (!model.has_graph()) throw InvalidModelError("the model has no graph");
  return model;
}

// The bytes of the file are gone before the graph is built.
onnx::ModelProto parse_file(const std::filesystem::path& path, const LoadOptions& options) {
  const InputFile file = open_regular_file(path);
  std::vector<std::byte> bytes(file.size());
  file.read(0, bytes.data(), bytes.size());
  return parse_model(bytes, options);
}

template <typename Body>
OnnxModel guard_memory(Body&& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    throw OutOfMemoryError("no memory for the model");
  }
}

}  // namespace

OnnxModel load_onnx_model_bytes(std::span<const std::byte> bytes, const LoadOptions& options,
                                const OpRegistry& registry) {
  return guard_memory(
      [&] { return ModelLoader(parse_model(bytes, options), options, registry).load(); });
}

OnnxModel load_onnx_model_bytes(std::span<const std::byte> bytes, const LoadOptions& options) {
  return load_onnx_model_bytes(bytes, options, op_registry());
}

OnnxModel load_onnx_model(const std::filesystem::path& path, const LoadOptions& options,
                          const OpRegistry& registry) {
  LoadOptions with_folder = options;
  if (!with_folder.external_data_directory) {
    with_folder.external_data_directory = path.parent_path();
  }
  return with_context(str(quoted_text(path.string()), ": "), [&] {
    return guard_memory([&] {
      onnx::ModelProto model = parse_file(path, with_folder);
      return ModelLoader(std::move(model), with_folder, registry).load();
    });
  });
}

OnnxModel load_onnx_model(const std::filesystem::path& path, const LoadOptions& options) {
  return load_onnx_model(path, options, op_registry());
}

Graph load_onnx(const std::filesystem::path& path, const LoadOptions& options) {
  return load_onnx_model(path, options).graph;
}

Graph load_onnx_bytes(std::span<const std::byte> bytes, const LoadOptions& options) {
  return load_onnx_model_bytes(bytes, options).graph;
}

}  // namespace ortrain
