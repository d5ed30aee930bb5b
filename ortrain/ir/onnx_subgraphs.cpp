// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/onnx_subgraphs.h"

#include <algorithm>
#include <optional>
#include <span>
#include <unordered_set>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/graph_builder.h"
#include "ortrain/ir/onnx_tensor.h"
#include "ortrain/ir/shape_inference.h"
#include "ortrain/ir/text_scanner.h"

namespace ortrain {
namespace {

// Of nodes and constants together: about 50 000 nodes without much in them.
constexpr int64_t kMostBytes = int64_t{1} << 26;
// Bytes in memory for a byte of a file, where it holds little but empty messages.
constexpr size_t kUnpacked = 16;

bool is_constant_node(const onnx::NodeProto& node) {
  return node.op_type() == "Constant" && (node.domain().empty() || node.domain() == "ai.onnx") &&
         node.input_size() == 0 && node.output_size() == 1 && node.attribute_size() == 1 &&
         node.attribute(0).name() == "value" && node.attribute(0).has_t();
}

// What a name has become; null for one that stays.
using FindName = std::function<const std::string*(const std::string&)>;

void rename_inputs(onnx::NodeProto& node, const FindName& find, const OpRegistry& registry);

// Replaces names from outside of a graph that its nodes read.
void rename_free(onnx::GraphProto& graph, const FindName& outer, const OpRegistry& registry) {
  std::unordered_set<std::string> own;
  for (const onnx::ValueInfoProto& input : graph.input()) own.insert(input.name());
  for (const onnx::TensorProto& tensor : graph.initializer()) own.insert(tensor.name());
  const FindName find = [&](const std::string& name) {
    return own.contains(name) ? nullptr : outer(name);
  };
  for (onnx::NodeProto& node : *graph.mutable_node()) {
    rename_inputs(node, find, registry);
    own.insert(node.output().begin(), node.output().end());
  }
  for (onnx::ValueInfoProto& output : *graph.mutable_output()) {
    if (const std::string* name = find(output.name())) output.set_name(*name);
  }
}

void rename_inputs(onnx::NodeProto& node, const FindName& find, const OpRegistry& registry) {
  const auto rename = [&](std::string& text) {
    const std::string* name = text.empty() ? nullptr : find(text);  // empty: an absent input
    if (name != nullptr) text = *name;
  };
  for (std::string& input : *node.mutable_input()) rename(input);
  const OpDef* def = registry.find(node.domain(), node.op_type());
  for (onnx::AttributeProto& attribute : *node.mutable_attribute()) {
    if (attribute.has_g()) rename_free(*attribute.mutable_g(), find, registry);
    if (def == nullptr || !def->names_values(attribute.name())) continue;
    if (attribute.has_s()) rename(*attribute.mutable_s());
    for (std::string& text : *attribute.mutable_strings()) rename(text);
  }
}

const onnx::AttributeProto* find_attribute(const onnx::NodeProto& node, std::string_view name) {
  for (const onnx::AttributeProto& attribute : node.attribute()) {
    if (attribute.name() == name) return &attribute;
  }
  return nullptr;
}

std::vector<int64_t> ints_of(const onnx::NodeProto& node, std::string_view name, size_t count) {
  const onnx::AttributeProto* found = find_attribute(node, name);
  if (found == nullptr) return std::vector<int64_t>(count, 0);
  std::vector<int64_t> values(found->ints().begin(), found->ints().end());
  if (values.size() != count) {
    throw InvalidModelError(
        str("attribute '", name, "' has ", values.size(), " entries, expected ", count));
  }
  return values;
}

// The single integer or boolean that a value is known to be.
std::optional<int64_t> known_number(const Value& value) {
  const std::optional<std::vector<int64_t>> known = known_integers(value);
  return known && known->size() == 1 ? std::optional(known->front()) : std::nullopt;
}

// The outputs of a step: what the next one is given, and a part of each collected value.
void take(std::span<const ValueId> outputs, std::vector<ValueId>& carried,
          std::vector<std::vector<ValueId>>& collected) {
  std::copy_n(outputs.begin(), carried.size(), carried.begin());
  for (size_t i = 0; i < collected.size(); ++i) {
    collected[i].push_back(outputs[carried.size() + i]);
  }
}

// Values of all steps along a new axis.
ValueId stacked(GraphBuilder& builder, const std::vector<ValueId>& steps, int64_t axis) {
  std::vector<ValueId> parts;
  for (ValueId step : steps) parts.push_back(builder.unsqueeze(step, {axis}));
  if (parts.size() == 1) return parts[0];
  return builder.op("Concat", std::move(parts), {{"axis", axis}});
}

}  // namespace

SubgraphInliner::SubgraphInliner(GraphAssembler& assembler, ExternalData& external,
                                 LoadNode load_node)
    : assembler_(assembler),
      external_(external),
      load_node_(std::move(load_node)),
      left_(kMostBytes) {}

bool SubgraphInliner::handles(const onnx::NodeProto& node) {
  if (!node.domain().empty() && node.domain() != "ai.onnx") return false;
  return node.op_type() == "If" || node.op_type() == "Loop" || node.op_type() == "Scan";
}

void SubgraphInliner::load(onnx::NodeProto& node, int64_t opset) {
  if (node.op_type() == "If") {
    load_if(node);
  } else if (node.op_type() == "Loop") {
    load_loop(node);
  } else if (opset < 9) {
    throw UnsupportedError(str("Scan of opset ", opset, "; it is supported since opset 9"));
  } else {
    load_scan(node);
  }
}

ValueId SubgraphInliner::value_of(const std::string& name) const {
  const ValueId value = assembler_.find(name);
  if (value == kNoValue) throw InvalidModelError(str("input ", quoted_text(name), " is not there"));
  return value;
}

onnx::GraphProto& SubgraphInliner::body_of(onnx::NodeProto& node,
                                           std::string_view attribute) const {
  for (onnx::AttributeProto& candidate : *node.mutable_attribute()) {
    if (candidate.name() == attribute && candidate.has_g()) return *candidate.mutable_g();
  }
  throw InvalidModelError(str("attribute '", attribute, "' is no graph"));
}

std::string SubgraphInliner::fresh_prefix() { return str("subgraph.", instances_++, "/"); }

void SubgraphInliner::spend(size_t bytes) {
  left_ -= static_cast<int64_t>(std::min(bytes, static_cast<size_t>(kMostBytes) + 1));
  if (left_ < 0) {
    throw UnsupportedError(
        str("written out, its branches and loops would take more than ", kMostBytes, " bytes"));
  }
}

SubgraphInliner::Names SubgraphInliner::load_constants(onnx::GraphProto& body,
                                                       const std::string& prefix) {
  if (body.sparse_initializer_size() > 0) throw UnsupportedError("a sparse initializer");
  Names names;
  const auto add = [&](const std::string& name, onnx::TensorProto& tensor) {
    if (name.empty()) throw InvalidModelError("a value of a body has an empty name");
    spend(128 + kUnpacked / 4 * tensor.ByteSizeLong());
    TensorData data = with_context(str("initializer ", quoted_text(name), ": "),
                                   [&] { return tensor_from_onnx(tensor, external_); });
    assembler_.add_constant(std::move(data), prefix + name);
    if (!names.emplace(name, prefix + name).second) {
      throw InvalidModelError(str("the value name ", quoted_text(name), " is defined twice"));
    }
  };
  for (onnx::TensorProto& tensor : *body.mutable_initializer()) add(tensor.name(), tensor);
  for (onnx::NodeProto& node : *body.mutable_node()) {
    if (is_constant_node(node)) add(node.output(0), *node.mutable_attribute(0)->mutable_t());
  }
  return names;
}

std::vector<ValueId> SubgraphInliner::step(onnx::GraphProto& body, const Names& constants,
                                           const std::vector<ValueId>& inputs) {
  const std::string prefix = fresh_prefix();
  Names names;
  const FindName find = [&](const std::string& name) -> const std::string* {
    if (const auto own = names.find(name); own != names.end()) return &own->second;
    const auto held = constants.find(name);
    return held == constants.end() ? nullptr : &held->second;
  };
  const auto define = [&](const std::string& name) {
    if (name.empty()) throw InvalidModelError("a value of a body has an empty name");
    if (constants.contains(name) || !names.emplace(name, prefix + name).second) {
      throw InvalidModelError(str("the value name ", quoted_text(name), " is defined twice"));
    }
  };
  if (static_cast<size_t>(body.input_size()) != inputs.size()) {
    throw InvalidModelError(
        str("a body takes ", body.input_size(), " inputs, expected ", inputs.size()));
  }
  // Unstacked and stacked, an input or output is two nodes.
  spend(1024 * static_cast<size_t>(1 + body.input_size() + body.output_size()));
  for (int i = 0; i < body.input_size(); ++i) {
    define(body.input(i).name());
    assembler_.add_alias(prefix + body.input(i).name(), inputs[static_cast<size_t>(i)]);
  }
  for (const onnx::NodeProto& node : body.node()) {
    if (is_constant_node(node)) continue;
    spend(256 + kUnpacked * node.ByteSizeLong());
    onnx::NodeProto copy = node;
    rename_inputs(copy, find, assembler_.registry());
    for (std::string& output : *copy.mutable_output()) {
      if (output.empty()) continue;
      define(output);
      output = prefix + output;
    }
    load_node_(copy);
  }
  std::vector<ValueId> outputs;
  for (const onnx::ValueInfoProto& output : body.output()) {
    const std::string* name = find(output.name());
    outputs.push_back(value_of(name == nullptr ? output.name() : *name));
  }
  return outputs;
}

void SubgraphInliner::bind(const onnx::NodeProto& node, const std::vector<ValueId>& values) {
  if (static_cast<size_t>(node.output_size()) > values.size()) {
    throw InvalidModelError(str("has ", node.output_size(), " outputs, its body ", values.size()));
  }
  for (int i = 0; i < node.output_size(); ++i) {
    if (!node.output(i).empty()) {
      assembler_.add_alias(node.output(i), values[static_cast<size_t>(i)]);
    }
  }
}

void SubgraphInliner::load_if(onnx::NodeProto& node) {
  if (node.input_size() != 1) throw InvalidModelError("takes one condition");
  const std::optional<int64_t> condition =
      known_number(assembler_.graph().value(value_of(node.input(0))));
  if (!condition) {
    throw UnsupportedError("its condition depends on data; a branch must be known beforehand");
  }
  onnx::GraphProto& body = body_of(node, *condition != 0 ? "then_branch" : "else_branch");
  bind(node, step(body, load_constants(body, fresh_prefix()), {}));
}

void SubgraphInliner::load_loop(onnx::NodeProto& node) {
  const auto is_given = [&](int i) { return i < node.input_size() && !node.input(i).empty(); };
  onnx::GraphProto& body = body_of(node, "body");
  GraphBuilder builder(assembler_.graph());
  std::optional<int64_t> trips;
  if (is_given(0)) {
    trips = known_number(builder.value(value_of(node.input(0))));
    if (!trips) throw UnsupportedError("its trip count depends on data; it must be known");
  }
  // Without a condition the one that the body makes counts for nothing.
  const bool asks = is_given(1);
  ValueId condition =
      asks ? value_of(node.input(1)) : builder.constant(TensorData::int_scalar(DType::boolean, 1));
  std::vector<ValueId> carried;
  for (int i = 2; i < node.input_size(); ++i) carried.push_back(value_of(node.input(i)));
  if (static_cast<size_t>(body.output_size()) < 1 + carried.size()) {
    throw InvalidModelError(str("its body has ", body.output_size(), " outputs for ",
                                carried.size(), " carried values"));
  }
  const size_t scans = static_cast<size_t>(body.output_size()) - 1 - carried.size();
  std::vector<std::vector<ValueId>> made(scans);
  const Names constants = load_constants(body, fresh_prefix());
  for (int64_t i = 0; !trips || i < *trips; ++i) {
    const std::optional<int64_t> runs = known_number(builder.value(condition));
    if (!runs) {
      throw UnsupportedError("its condition depends on data; the number of steps must be known");
    }
    if (*runs == 0) break;
    std::vector<ValueId> inputs{builder.constant(TensorData::int_scalar(DType::i64, i)), condition};
    inputs.insert(inputs.end(), carried.begin(), carried.end());
    const std::vector<ValueId> outputs = step(body, constants, inputs);
    if (asks) condition = outputs[0];
    take(std::span(outputs).subspan(1), carried, made);
  }
  std::vector<ValueId> results = carried;
  for (const std::vector<ValueId>& steps : made) {
    if (steps.empty()) throw UnsupportedError("a loop without steps that collects values");
    results.push_back(stacked(builder, steps, 0));
  }
  bind(node, results);
}

void SubgraphInliner::load_scan(onnx::NodeProto& node) {
  onnx::GraphProto& body = body_of(node, "body");
  const onnx::AttributeProto* count = find_attribute(node, "num_scan_inputs");
  const int64_t given = node.input_size();
  if (count == nullptr || count->i() < 1 || count->i() > given) {
    throw InvalidModelError(str("attribute 'num_scan_inputs' does not fit ", given, " inputs"));
  }
  const size_t scanned = static_cast<size_t>(count->i());
  const size_t states = static_cast<size_t>(given) - scanned;
  if (static_cast<size_t>(body.output_size()) < states) {
    throw InvalidModelError(
        str("its body has ", body.output_size(), " outputs for ", states, " states"));
  }
  const size_t collected = static_cast<size_t>(body.output_size()) - states;
  const std::vector<int64_t> axes = ints_of(node, "scan_input_axes", scanned);
  const std::vector<int64_t> backward = ints_of(node, "scan_input_directions", scanned);
  const std::vector<int64_t> out_axes = ints_of(node, "scan_output_axes", collected);
  const std::vector<int64_t> out_backward = ints_of(node, "scan_output_directions", collected);

  GraphBuilder builder(assembler_.graph());
  std::vector<ValueId> carried, sequences;
  for (size_t i = 0; i < states + scanned; ++i) {
    (i < states ? carried : sequences).push_back(value_of(node.input(static_cast<int>(i))));
  }
  int64_t length = -1;
  std::vector<int64_t> along;
  for (size_t i = 0; i < scanned; ++i) {
    const Shape& shape = builder.shape(sequences[i]);
    along.push_back(normalize_axis(axes[i], shape.size()));
    const Dim& extent = shape[static_cast<size_t>(along[i])];
    if (!extent.is_constant()) {
      throw UnsupportedError(
          str("the number of steps must be known, a scanned input is ", shape_str(shape)));
    }
    if (length >= 0 && extent.constant() != length) {
      throw InvalidModelError(
          str("scanned inputs have ", length, " and ", extent.constant(), " steps"));
    }
    length = extent.constant();
  }
  std::vector<std::vector<ValueId>> made(collected);
  const Names constants = load_constants(body, fresh_prefix());
  for (int64_t t = 0; t < length; ++t) {
    std::vector<ValueId> inputs = carried;
    for (size_t i = 0; i < scanned; ++i) {
      const int64_t at = backward[i] != 0 ? length - 1 - t : t;
      const ValueId slice =
          builder.op("Slice", {sequences[i], builder.int64s({at}), builder.int64s({at + 1}),
                               builder.int64s({along[i]})});
      inputs.push_back(builder.squeeze(slice, {along[i]}));
    }
    const std::vector<ValueId> outputs = step(body, constants, inputs);
    take(outputs, carried, made);
  }
  std::vector<ValueId> results = carried;
  for (size_t i = 0; i < collected; ++i) {
    if (made[i].empty()) throw UnsupportedError("a scan without steps that collects values");
    if (out_backward[i] != 0) std::reverse(made[i].begin(), made[i].end());
    const size_t rank = builder.shape(made[i][0]).size() + 1;
    results.push_back(stacked(builder, made[i], normalize_axis(out_axes[i], rank)));
  }
  bind(node, results);
}

}  // namespace ortrain
