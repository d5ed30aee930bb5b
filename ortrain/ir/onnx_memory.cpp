// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/onnx_memory.h"

#include <algorithm>

#include "onnx/onnx-ml.pb.h"
#include "ortrain/ir/graph.h"

namespace ortrain {
namespace {

// A message in a list: itself, its pointer, and what the allocator adds.
template <typename T>
constexpr uint64_t kMessage = sizeof(T) + 40;
// Lists double when they grow, and hold the old elements while they do.
constexpr uint64_t kListGrowth = 3;
constexpr uint64_t kString = kListGrowth * sizeof(std::string) + 24;
// What the graph holds for a node, an attribute, and a value with its name in two tables.
constexpr uint64_t kGraphNode = sizeof(Node) + 128;
constexpr uint64_t kGraphAttribute = sizeof(Attribute) + 112;
constexpr uint64_t kGraphValue = sizeof(Value) + 256;
// An extent in a shape of a graph.
constexpr uint64_t kExtent = kListGrowth * sizeof(Dim);

class Scan {
 public:
  enum class Kind {
    model,
    graph,
    training,
    function,
    node,
    attribute,
    tensor,
    sparse,
    annotation,
    value_info,
    type,
    wrapped_type,
    tensor_type,
    shape,
    other
  };

  Scan(Kind kind, uint64_t& total) : kind_(kind), total_(&total) {}

  // The form that Reader::message asks for.
  bool merge_from(onnx::wire::Reader& reader) {
    while (!reader.done()) {
      uint32_t field = 0;
      uint32_t wire = 0;
      if (!reader.tag(field, wire)) return false;
      if (!scan_field(reader, field, wire)) return false;
    }
    return true;
  }

 private:
  struct Child {
    Kind kind;
    uint64_t bytes;
  };
  static constexpr Child kEntry{Kind::other, kMessage<onnx::StringStringEntryProto>};
  static constexpr Child kImport{Kind::other, kMessage<onnx::OperatorSetIdProto>};
  static constexpr Child kGraph{Kind::graph, kMessage<onnx::GraphProto>};
  static constexpr Child kNode{Kind::node, kMessage<onnx::NodeProto> + kGraphNode};
  static constexpr Child kAttribute{Kind::attribute,
                                    kMessage<onnx::AttributeProto> + kGraphAttribute};
  static constexpr Child kTensor{Kind::tensor, kMessage<onnx::TensorProto> + kGraphValue};
  static constexpr Child kSparse{Kind::sparse, kMessage<onnx::SparseTensorProto>};
  static constexpr Child kValue{Kind::value_info, kMessage<onnx::ValueInfoProto>};
  static constexpr Child kType{Kind::type, kMessage<onnx::TypeProto>};

  // The messages that a file can hold many of; nullopt for anything else.
  static std::optional<Child> child_of(Kind parent, uint32_t field) {
    switch (parent) {
      case Kind::model:
        if (field == 7) return kGraph;
        if (field == 8) return kImport;
        if (field == 14) return kEntry;
        if (field == 20) return Child{Kind::training, kMessage<onnx::TrainingInfoProto>};
        if (field == 25) return Child{Kind::function, kMessage<onnx::FunctionProto>};
        break;
      case Kind::graph:
        if (field == 1) return kNode;
        if (field == 5) return kTensor;
        if (field == 11 || field == 12 || field == 13) return kValue;
        if (field == 14) return Child{Kind::annotation, kMessage<onnx::TensorAnnotation>};
        if (field == 15) return kSparse;
        if (field == 16) return kEntry;
        break;
      case Kind::training:
        if (field == 1 || field == 2) return kGraph;
        if (field == 3 || field == 4) return kEntry;
        break;
      case Kind::function:
        if (field == 7) return kNode;
        if (field == 9) return kImport;
        if (field == 11) return kAttribute;
        if (field == 12) return kValue;
        if (field == 14) return kEntry;
        break;
      case Kind::node:
        if (field == 5) return kAttribute;
        if (field == 9) return kEntry;
        break;
      case Kind::attribute:
        if (field == 5 || field == 10) return kTensor;
        if (field == 6 || field == 11) return kGraph;
        if (field == 14 || field == 15) return kType;
        if (field == 22 || field == 23) return kSparse;
        break;
      case Kind::tensor:
        if (field == 13 || field == 16) return kEntry;
        break;
      case Kind::sparse:
        if (field == 1 || field == 2) return kTensor;
        break;
      case Kind::annotation:
        if (field == 2) return kEntry;
        break;
      case Kind::value_info:
        if (field == 2) return kType;
        if (field == 4) return kEntry;
        break;
      case Kind::type:
        if (field == 1 || field == 8) {
          return Child{Kind::tensor_type, kMessage<onnx::TypeProto_Tensor>};
        }
        if (field == 4 || field == 5 || field == 9) {
          return Child{Kind::wrapped_type, kMessage<onnx::TypeProto_Map>};
        }
        break;
      case Kind::wrapped_type:
        if (field == 1 || field == 2) return kType;
        break;
      case Kind::tensor_type:
        if (field == 2) return Child{Kind::shape, kMessage<onnx::TensorShapeProto>};
        break;
      case Kind::shape:
        if (field == 1) {
          return Child{Kind::other, kMessage<onnx::TensorShapeProto_Dimension> + kExtent};
        }
        break;
      case Kind::other:
        break;
    }
    return std::nullopt;
  }

  // Device placement, which is dropped; what it holds is not looked at one by one.
  static bool is_placement(Kind parent, uint32_t field) {
    return (parent == Kind::model && field == 26) || (parent == Kind::node && field == 10);
  }

  static uint64_t element_bytes(Kind kind, uint32_t field) {
    if (kind == Kind::tensor && field == 5) return sizeof(int32_t);
    if (kind == Kind::tensor && (field == 7 || field == 11)) return sizeof(int64_t);
    if (kind == Kind::tensor && field == 1) return sizeof(int64_t) + kExtent;
    if (kind == Kind::attribute && field == 8) return 2 * sizeof(int64_t);
    if (kind == Kind::sparse && field == 3) return sizeof(int64_t);
    return 0;  // not a list of varints
  }

  bool scan_field(onnx::wire::Reader& reader, uint32_t field, uint32_t wire) {
    if (wire == onnx::wire::kBytes) {
      if (const std::optional<Child> child = child_of(kind_, field)) {
        *total_ += child->bytes;
        Scan inside(child->kind, *total_);
        return reader.message(wire, inside);
      }
    }
    const uint8_t* const begin = reader.position();
    if (!reader.skip(field, wire)) return false;
    const auto size = static_cast<uint64_t>(reader.position() - begin);
    const uint64_t element = element_bytes(kind_, field);
    if (wire != onnx::wire::kBytes) {
      *total_ += kListGrowth * std::max<uint64_t>(element, sizeof(int64_t));
    } else if (element > 0) {
      const auto ends = std::count_if(begin, reader.position(), [](uint8_t b) { return b < 0x80; });
      *total_ += element * static_cast<uint64_t>(ends);
    } else if (is_placement(kind_, field)) {
      *total_ += 64 * size + kMessage<onnx::NodeDeviceConfigurationProto>;
    } else if (kind_ == Kind::attribute && field == 7) {
      *total_ += size + size / sizeof(float) * sizeof(double);
    } else {
      const bool is_output = kind_ == Kind::node && field == 2;
      *total_ += size + kString + (is_output ? kGraphValue : 0);
    }
    return true;
  }

  Kind kind_;
  uint64_t* total_;
};

}  // namespace

std::optional<uint64_t> onnx_memory(std::span<const std::byte> model) {
  uint64_t total = sizeof(onnx::ModelProto);
  Scan scan(Scan::Kind::model, total);
  onnx::wire::Reader reader(model.data(), model.size(), 0);
  if (!scan.merge_from(reader)) return std::nullopt;
  return total;
}

}  // namespace ortrain
