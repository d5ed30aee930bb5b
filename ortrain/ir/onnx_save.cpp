// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <map>
#include <optional>
#include <unordered_set>
#include <utility>

#include "onnx/onnx-ml.pb.h"
#include "ortrain/base/error.h"
#include "ortrain/ir/confined_file.h"
#include "ortrain/ir/onnx_attributes.h"
#include "ortrain/ir/onnx_io.h"
#include "ortrain/ir/onnx_metadata.h"
#include "ortrain/ir/onnx_tensor.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/text_scanner.h"

namespace ortrain {
namespace {

namespace metadata = onnx_metadata;

// The first with opset 23; metadata_props exist since 10.
constexpr int64_t kIrVersion = 11;
constexpr int64_t kOrtrainOpset = 1;
// Readers map files by pages.
constexpr uint64_t kExternalAlignment = 4096;
// Protobuf readers refuse longer messages.
constexpr size_t kMaxModelBytes = 0x7fffffff;

uint64_t checksum(uint64_t hash, const TensorData& data) {
  // FNV-1a over words: it names a file, it protects nothing.
  constexpr uint64_t kPrime = 0x100000001b3;
  const auto* bytes = static_cast<const unsigned char*>(data.data());
  const size_t size = data.bytes();
  size_t at = 0;
  for (; at + 8 <= size; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, 8);
    hash = (hash ^ word) * kPrime;
    hash ^= hash >> 29;
  }
  for (; at < size; ++at) hash = (hash ^ bytes[at]) * kPrime;
  return hash;
}

// Tensors in the second file, in its order.
struct ExternalTensor {
  onnx::TensorProto* proto;
  TensorData data;
  uint64_t offset;
};

class ModelWriter {
 public:
  ModelWriter(const Graph& graph, const SaveOptions& options)
      : graph_(graph), options_(options), proto_(*model_.mutable_graph()) {}

  onnx::ModelProto write() {
    model_.set_ir_version(kIrVersion);
    model_.set_producer_name("ortrain");
    add_opset("", kOnnxOpset);
    add_opset(std::string(kOrtrainDomain), kOrtrainOpset);
    for (const auto& [domain, version] : other_domains()) add_opset(domain, version);
    proto_.set_name(graph_.name.empty() ? "graph" : graph_.name);
    if (graph_.name.empty()) {
      add_metadata(*proto_.mutable_metadata_props(), metadata::kUnnamed, metadata::kTrue);
    }
    for (size_t i = 0; i < graph_.num_values(); ++i) {
      names_.insert(graph_.value(static_cast<ValueId>(i)).name);
    }
    for (const GraphInput& input : graph_.inputs()) write_input(input);
    check_values_used();
    if (!trained_.empty()) {
      add_metadata(*proto_.mutable_metadata_props(), metadata::kTrained, trained_);
    }
    write_constants();
    for (NodeId id : graph_.order()) write_node(graph_.node(id));
    for (const GraphOutput& output : graph_.outputs()) write_output(output);
    write_infos();
    return std::move(model_);
  }

  const std::vector<ExternalTensor>& external() const { return external_; }

 private:
  void add_opset(const std::string& domain, int64_t version) {
    onnx::OperatorSetIdProto* import = model_.add_opset_import();
    import->set_domain(domain);
    import->set_version(version);
  }

  // The domains of extensions, each at the newest version that a node needs.
  std::map<std::string, int64_t> other_domains() const {
    std::map<std::string, int64_t> versions;
    for (NodeId id : graph_.order()) {
      const Node& node = graph_.node(id);
      if (node.domain.empty() || node.domain == kOrtrainDomain) continue;
      const OpDef* def = op_registry().find(node.domain, node.op);
      int64_t& version = versions[node.domain];
      version = std::max<int64_t>(version, def == nullptr ? 1 : def->since);
    }
    return versions;
  }

  void write_type(const Value& value, onnx::ValueInfoProto& info) const {
    onnx::TypeProto_Tensor* type = info.mutable_type()->mutable_tensor_type();
    type->set_elem_type(static_cast<int32_t>(value.dtype));
    onnx::TensorShapeProto* shape = type->mutable_shape();
    for (const Dim& dim : value.shape) {
      auto* extent = shape->add_dim();
      if (dim.is_constant()) {
        extent->set_dim_value(dim.constant());
      } else {
        extent->set_dim_param(dim.str());
      }
    }
  }

  void list_input(const GraphInput& input) {
    const Value& value = graph_.value(input.value);
    onnx::ValueInfoProto& info = *proto_.add_input();
    info.set_name(value.name);
    write_type(value, info);
    auto& entries = *info.mutable_metadata_props();
    if (input.role != InputRole::user) {
      add_metadata(entries, metadata::kRole, std::string(name_of(input.role)));
    }
    if (!input.target.empty()) add_metadata(entries, metadata::kTarget, input.target);
    if (input.requires_grad) add_metadata(entries, metadata::kRequiresGrad, metadata::kTrue);
  }

  void write_input(const GraphInput& input) {
    const Value& value = graph_.value(input.value);
    const bool has_contents = is_kept(input.role) && options_.values.contains(input.target);
    if (!has_contents || options_.lists_initializers) list_input(input);
    if (!is_kept(input.role)) return;
    auto contents = options_.values.find(input.target);
    if (contents == options_.values.end()) return;
    const TensorData& data = contents->second;
    bool fits = data.dtype() == value.dtype && data.dims().size() == value.shape.size();
    for (size_t i = 0; fits && i < value.shape.size(); ++i) {
      fits = !value.shape[i].is_constant() || value.shape[i].is(data.dims()[i]);
    }
    if (!fits) {
      throw InvalidModelError(str("parameter ", quoted_text(input.target), " is ",
                                  name_of(value.dtype), shape_str(value.shape), ", its value is ",
                                  name_of(data.dtype()), dims_str(data.dims())));
    }
    used_values_.insert(input.target);
    if (!options_.lists_initializers && input.role == InputRole::parameter && input.requires_grad) {
      trained_ += (trained_.empty() ? "" : "\n") + value.name;
    }
    write_initializer(value.name, data);
  }

  void check_values_used() const {
    for (const auto& [target, data] : options_.values) {
      if (!used_values_.contains(target)) {
        throw InvalidModelError(str("no parameter or buffer is ", quoted_text(target)));
      }
    }
  }

  void write_initializer(const std::string& name, const TensorData& data) {
    onnx::TensorProto& tensor = *proto_.add_initializer();
    tensor.set_name(name);
    const bool external = options_.external_data_threshold && data.bytes() > 0 &&
                          data.bytes() >= *options_.external_data_threshold;
    if (!external) {
      write_tensor(data, tensor);
      return;
    }
    write_tensor_type(data, tensor);
    external_.push_back({&tensor, data, external_bytes_});
    external_bytes_ +=
        (data.bytes() + kExternalAlignment - 1) / kExternalAlignment * kExternalAlignment;
  }

  void write_constants() {
    std::vector<bool> used(graph_.num_values(), false);
    for (NodeId id : graph_.order()) {
      for (ValueId input : graph_.node(id).inputs) {
        if (input != kNoValue) used[static_cast<size_t>(input)] = true;
      }
    }
    for (const GraphOutput& output : graph_.outputs()) {
      used[static_cast<size_t>(output.value)] = true;
    }
    for (size_t i = 0; i < used.size(); ++i) {
      const Value& value = graph_.value(static_cast<ValueId>(i));
      if (used[i] && value.kind == ValueKind::constant) {
        write_initializer(value.name, value.constant);
      }
    }
  }

  void write_node(const Node& node) {
    onnx::NodeProto& proto = *proto_.add_node();
    proto.set_op_type(node.op);
    if (!node.domain.empty()) proto.set_domain(node.domain);
    if (!node.name.empty()) proto.set_name(node.name);
    for (ValueId input : node.inputs) {
      proto.add_input(input == kNoValue ? "" : graph_.value(input).name);
    }
    for (ValueId output : node.outputs) {
      proto.add_output(output == kNoValue ? "" : graph_.value(output).name);
    }
    write_attributes(node.attributes, proto);
    if (node.phase == Phase::backward) {
      add_metadata(*proto.mutable_metadata_props(), metadata::kPhase, metadata::kBackward);
    }
    if (node.checkpoint != 0) {
      add_metadata(*proto.mutable_metadata_props(), metadata::kCheckpoint,
                   std::to_string(node.checkpoint));
    }
  }

  // ONNX outputs are computed values with names of their own; ours may be any value, several times.
  void write_output(const GraphOutput& output) {
    const Value& value = graph_.value(output.value);
    std::string name = value.name;
    if (value.kind != ValueKind::computed || output.name != value.name ||
        !output_names_.insert(name).second) {
      name = unused(output.name);
      onnx::NodeProto& alias = *proto_.add_node();
      alias.set_op_type("Identity");
      alias.add_input(value.name);
      alias.add_output(name);
      add_metadata(*alias.mutable_metadata_props(), metadata::kAlias, metadata::kTrue);
    }
    onnx::ValueInfoProto& info = *proto_.add_output();
    info.set_name(name);
    write_type(value, info);
    auto& entries = *info.mutable_metadata_props();
    if (name != output.name) add_metadata(entries, metadata::kOutputName, output.name);
    if (output.role != OutputRole::user) {
      add_metadata(entries, metadata::kRole, std::string(name_of(output.role)));
    }
    if (!output.target.empty()) add_metadata(entries, metadata::kTarget, output.target);
  }

  std::string unused(std::string wanted) {
    if (wanted.empty()) wanted = "output";
    std::string name = wanted;
    for (int i = 1; !names_.insert(name).second; ++i) name = str(wanted, "_", i);
    return name;
  }

  void write_infos() {
    for (NodeId id : graph_.order()) {
      for (ValueId output : graph_.node(id).outputs) {
        if (output == kNoValue || output_names_.contains(graph_.value(output).name)) continue;
        onnx::ValueInfoProto& info = *proto_.add_value_info();
        info.set_name(graph_.value(output).name);
        write_type(graph_.value(output), info);
      }
    }
  }

  const Graph& graph_;
  const SaveOptions& options_;
  onnx::ModelProto model_;
  onnx::GraphProto& proto_;
  std::unordered_set<std::string> names_;
  std::unordered_set<std::string> output_names_;  // values that are outputs under their own name
  std::unordered_set<std::string> used_values_;
  std::string trained_;  // names of initializers, by lines
  std::vector<ExternalTensor> external_;
  uint64_t external_bytes_ = 0;
};

std::string external_name(const std::string& model_name, const SaveOptions& options,
                          const std::vector<ExternalTensor>& tensors) {
  if (!options.external_data_file.empty()) return options.external_data_file;
  uint64_t hash = 0xcbf29ce484222325;
  for (const ExternalTensor& tensor : tensors) hash = checksum(hash, tensor.data);
  std::array<char, 17> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + 16, hash, 16).ptr;
  return str(model_name, ".", std::string(digits.data(), end), ".data");
}

void set_location(const ExternalTensor& tensor, const std::string& file) {
  tensor.proto->set_data_location(onnx::TensorProto::EXTERNAL);
  auto& entries = *tensor.proto->mutable_external_data();
  add_metadata(entries, "location", file);
  add_metadata(entries, "offset", std::to_string(tensor.offset));
  add_metadata(entries, "length", std::to_string(tensor.data.bytes()));
}

void write_external(OutputFile& file, const std::vector<ExternalTensor>& tensors) {
  static constexpr std::array<char, kExternalAlignment> kPadding{};
  for (const ExternalTensor& tensor : tensors) {
    file.write(kPadding.data(), tensor.offset - file.size());
    file.write(tensor.data.data(), tensor.data.bytes());
  }
}

std::string serialize(const onnx::ModelProto& model) {
  if (model.ByteSizeLong() > kMaxModelBytes) {
    throw UnsupportedError(
        "the model is longer than 2 GiB; set external_data_threshold to keep tensors apart");
  }
  return model.SerializeAsString();
}

}  // namespace

std::string to_onnx_bytes(const Graph& graph, const SaveOptions& options) {
  if (options.external_data_threshold) {
    throw UnsupportedError("a model in memory has no second file for external data");
  }
  return serialize(ModelWriter(graph, options).write());
}

void save_onnx(const Graph& graph, const std::filesystem::path& path, const SaveOptions& options) {
  const std::string name = path.filename().string();
  if (options.external_data_threshold && options.external_data_file == name) {
    throw FileError(str(quoted_text(name), " cannot hold both the model and its data"));
  }
  ModelWriter writer(graph, options);
  onnx::ModelProto model = writer.write();
  std::optional<OutputFile> data_file;
  if (!writer.external().empty()) {
    const std::string data_name = external_name(name, options, writer.external());
    data_file.emplace(path.parent_path(), data_name);
    for (const ExternalTensor& tensor : writer.external()) set_location(tensor, data_name);
    write_external(*data_file, writer.external());
  }
  const std::string bytes = serialize(model);
  OutputFile model_file(path.parent_path(), name);
  model_file.write(bytes.data(), bytes.size());
  // The data first: a model never names what is not there yet.
  if (data_file) data_file->commit();
  model_file.commit();
}

}  // namespace ortrain
