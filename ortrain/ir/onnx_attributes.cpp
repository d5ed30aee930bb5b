// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/onnx_attributes.h"

#include <bit>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>

#include "ortrain/base/error.h"
#include "ortrain/base/printable.h"
#include "ortrain/ir/onnx_metadata.h"
#include "ortrain/ir/onnx_tensor.h"
#include "ortrain/ir/text_scanner.h"
#include "ortrain/ir/text_values.h"

namespace ortrain {
namespace {

using Proto = onnx::AttributeProto;

float to_float32(double value) {
  constexpr double kMax = std::numeric_limits<float>::max();
  // Out of range, the conversion itself is undefined.
  if (value > kMax) return std::numeric_limits<float>::infinity();
  if (value < -kMax) return -std::numeric_limits<float>::infinity();
  return static_cast<float>(value);
}

bool same_bits(double a, double b) {
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}

bool is_exact(double value) {
  return std::isnan(value) || same_bits(static_cast<double>(to_float32(value)), value);
}

// "0.1 1e+300": the digits of each element.
std::string digits_of(const std::vector<double>& values) {
  std::string result;
  for (double value : values) result += (result.empty() ? "" : " ") + float_text(value);
  return result;
}

// nullopt unless the text has one number for each element that rounds to it: a tool may have
// changed the attribute and kept the metadata.
std::optional<std::vector<double>> exact_values(const std::string& text,
                                                const std::vector<double>& rounded) {
  std::vector<double> values;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at < end && values.size() < rounded.size()) {
    double value = 0;
    const auto [stop, error] = std::from_chars(at, end, value);
    if (error != std::errc() || (stop != end && *stop != ' ')) return std::nullopt;
    const double expected = rounded[values.size()];
    const bool both_nan = std::isnan(value) && std::isnan(expected);
    if (!both_nan && !same_bits(to_float32(value), expected)) return std::nullopt;
    values.push_back(value);
    at = stop == end ? end : stop + 1;
  }
  if (at != end || values.size() != rounded.size()) return std::nullopt;
  return values;
}

std::string_view unsupported_kind(Proto::AttributeType type) {
  switch (type) {
    case Proto::GRAPH:
    case Proto::GRAPHS:
      return "a subgraph";
    case Proto::SPARSE_TENSOR:
    case Proto::SPARSE_TENSORS:
      return "a sparse tensor";
    case Proto::TYPE_PROTO:
    case Proto::TYPE_PROTOS:
      return "a type";
    case Proto::TENSORS:
      return "a list of tensors";
    default:
      return "";
  }
}

std::vector<double> widen(const onnx::wire::RepeatedField<float>& values) {
  return std::vector<double>(values.begin(), values.end());
}

// ONNX allows any bytes; what our operators take is text.
std::string text_of(const std::string& bytes) {
  if (!is_utf8(bytes)) throw UnsupportedError("bytes that are no UTF-8 text");
  return bytes;
}

Attribute read_attribute(Proto& proto, const std::string& exact, ExternalData& external) {
  if (!proto.ref_attr_name().empty()) {
    throw UnsupportedError("a reference to an attribute of a function");
  }
  switch (proto.type()) {
    case Proto::INT:
      return proto.i();
    case Proto::FLOAT: {
      const double value = proto.f();
      const auto digits = exact_values(exact, {value});
      return digits ? digits->front() : value;
    }
    case Proto::STRING:
      return text_of(proto.s());
    case Proto::INTS:
      return std::vector<int64_t>(proto.ints().begin(), proto.ints().end());
    case Proto::FLOATS: {
      std::vector<double> values = widen(proto.floats());
      return exact_values(exact, values).value_or(std::move(values));
    }
    case Proto::STRINGS: {
      std::vector<std::string> texts;
      for (const std::string& bytes : proto.strings()) texts.push_back(text_of(bytes));
      return texts;
    }
    case Proto::TENSOR:
      if (!proto.has_t()) throw InvalidModelError("it is a tensor, and has none");
      return tensor_from_onnx(*proto.mutable_t(), external);
    default:
      break;
  }
  const std::string_view kind = unsupported_kind(proto.type());
  if (!kind.empty()) throw UnsupportedError(std::string(kind));
  throw InvalidModelError("it has no kind");
}

struct AttributeWriter {
  Proto& proto;

  void operator()(int64_t value) const {
    proto.set_type(Proto::INT);
    proto.set_i(value);
  }
  void operator()(double value) const {
    proto.set_type(Proto::FLOAT);
    proto.set_f(to_float32(value));
  }
  void operator()(const std::string& value) const {
    proto.set_type(Proto::STRING);
    proto.set_s(value);
  }
  void operator()(const std::vector<int64_t>& values) const {
    proto.set_type(Proto::INTS);
    for (int64_t value : values) proto.add_ints(value);
  }
  void operator()(const std::vector<double>& values) const {
    proto.set_type(Proto::FLOATS);
    for (double value : values) proto.add_floats(to_float32(value));
  }
  void operator()(const std::vector<std::string>& values) const {
    proto.set_type(Proto::STRINGS);
    for (const std::string& value : values) proto.add_strings(value);
  }
  void operator()(const TensorData& value) const {
    proto.set_type(Proto::TENSOR);
    write_tensor(value, *proto.mutable_t());
  }
};

}  // namespace

const std::string& metadata_value(
    const onnx::wire::RepeatedMessage<onnx::StringStringEntryProto>& entries,
    std::string_view key) {
  for (const onnx::StringStringEntryProto& entry : entries) {
    if (entry.key() == key) return entry.value();
  }
  return onnx::wire::empty_string();
}

void add_metadata(onnx::wire::RepeatedMessage<onnx::StringStringEntryProto>& entries,
                  std::string_view key, std::string_view value) {
  onnx::StringStringEntryProto* entry = entries.Add();
  entry->set_key(std::string(key));
  entry->set_value(std::string(value));
}

Attributes attributes_from_onnx(onnx::NodeProto& node, ExternalData& external) {
  Attributes attributes;
  std::map<std::string_view, const std::string*> digits;
  for (const onnx::StringStringEntryProto& entry : node.metadata_props()) {
    const std::string_view key = entry.key();
    if (key.starts_with(onnx_metadata::kFloat64)) {
      digits.emplace(key.substr(onnx_metadata::kFloat64.size()), &entry.value());
    }
  }
  for (Proto& proto : *node.mutable_attribute()) {
    const std::string name = proto.name();
    with_context(str("attribute ", quoted_text(name), ": "), [&] {
      auto found = digits.find(name);
      const std::string& exact =
          found == digits.end() ? onnx::wire::empty_string() : *found->second;
      Attribute attribute = read_attribute(proto, exact, external);
      if (!attributes.emplace(name, std::move(attribute)).second) {
        throw InvalidModelError("it is given twice");
      }
    });
  }
  return attributes;
}

void write_attributes(const Attributes& attributes, onnx::NodeProto& node) {
  for (const auto& [name, attribute] : attributes) {
    Proto* proto = node.add_attribute();
    proto->set_name(name);
    std::visit(AttributeWriter{*proto}, attribute);
    std::vector<double> floats;
    if (const auto* value = std::get_if<double>(&attribute)) floats = {*value};
    if (const auto* values = std::get_if<std::vector<double>>(&attribute)) floats = *values;
    for (double value : floats) {
      if (is_exact(value)) continue;
      add_metadata(*node.mutable_metadata_props(), std::string(onnx_metadata::kFloat64) + name,
                   digits_of(floats));
      break;
    }
  }
}

}  // namespace ortrain
