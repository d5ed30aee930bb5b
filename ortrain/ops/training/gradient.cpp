// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "ortrain/autodiff/build_backward.h"
#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::ops {
namespace {

using ValueMap = std::unordered_map<ValueId, ValueId>;

// ONNX's Gradient: y as a function of the values named xs and zs, differentiated by xs where these
// are the node's inputs. What y is made of is copied into a graph of its own, differentiated there,
// and the result copied back.
class NamedGradient {
 public:
  explicit NamedGradient(ExpandContext& e) : e_(e), builder_(part_) {
    xs_ = e.attrs().strings("xs");
    names_ = xs_;
    if (e.attrs().has("zs")) {
      const std::vector<std::string>& zs = e.attrs().strings("zs");
      names_.insert(names_.end(), zs.begin(), zs.end());
    }
    if (names_.size() != e.num_inputs()) {
      throw InvalidModelError(
          str("names ", names_.size(), " values, has ", e.num_inputs(), " inputs"));
    }
    y_ = named(e.attrs().string_("y"));
  }

  std::vector<ValueId> build() {
    for (size_t i = 0; i < names_.size(); ++i) {
      const ValueId value = named(names_[i]);
      const bool wanted = i < xs_.size();
      const ValueId given = e_.input(i);
      if (e_.dtype(given) != e_.dtype(value) || e_.shape(given) != e_.shape(value)) {
        throw ShapeError(str("input ", i, " is ", name_of(e_.dtype(given)),
                             shape_str(e_.shape(given)), ", '", names_[i],
                             "', which it stands for, ", name_of(e_.dtype(value)),
                             shape_str(e_.shape(value))));
      }
      if (wanted && !is_float(e_.dtype(value))) {
        throw InvalidModelError(
            str("'", names_[i], "' is ", name_of(e_.dtype(value)), ", which has no gradient"));
      }
      if (!inside_.emplace(value, add_input(value, wanted)).second) {
        throw InvalidModelError(str("'", names_[i], "' is named twice"));
      }
      outside_.push_back(e_.input(i));
    }
    copy_what_makes_y();
    part_.add_output({inside_.at(y_), "y", OutputRole::user, ""});
    build_backward(part_, {.output_indices = {0}});
    return copied_back();
  }

 private:
  ValueId named(const std::string& name) const {
    const ValueId value = e_.graph().find_value(name);
    if (value == kNoValue) throw InvalidModelError(str("no value has the name '", name, "'"));
    return value;
  }

  ValueId add_input(ValueId value, bool requires_grad) {
    return part_.add_input({kNoValue, InputRole::user, "", requires_grad}, e_.value(value).name,
                           e_.dtype(value), e_.shape(value));
  }

  // Nodes between the named values and y.
  std::unordered_set<NodeId> nodes_of_y() const {
    std::unordered_set<NodeId> needed;
    std::vector<ValueId> pending{y_};
    while (!pending.empty()) {
      const ValueId id = pending.back();
      pending.pop_back();
      const NodeId producer = e_.value(id).producer;
      if (inside_.contains(id) || producer == kNoNode || !needed.insert(producer).second) continue;
      for (ValueId input : e_.graph().node(producer).inputs) {
        if (input != kNoValue) pending.push_back(input);
      }
    }
    return needed;
  }

  void copy_what_makes_y() {
    const std::unordered_set<NodeId> needed = nodes_of_y();
    for (NodeId id : e_.graph().order()) {
      if (needed.contains(id))
        copy(e_.graph().node(id), builder_, inside_, [&](ValueId value) {
          if (e_.value(value).constant.defined())
            return part_.add_constant(e_.value(value).constant);
          outside_.push_back(value);
          return add_input(value, false);
        });
    }
    if (!inside_.contains(y_)) throw InvalidModelError("y is no result of a node");
  }

  template <typename Missing>
  static void copy(const Node& node, GraphBuilder& to, ValueMap& values, const Missing& missing) {
    std::vector<ValueId> inputs;
    for (ValueId input : node.inputs) {
      if (input == kNoValue) {
        inputs.push_back(kNoValue);
        continue;
      }
      auto found = values.find(input);
      if (found == values.end()) found = values.emplace(input, missing(input)).first;
      inputs.push_back(found->second);
    }
    std::vector<bool> wanted;
    for (ValueId output : node.outputs) wanted.push_back(output != kNoValue);
    const std::vector<ValueId> made =
        to.node(node.domain, node.op, std::move(inputs), node.attributes, wanted);
    for (size_t i = 0; i < made.size(); ++i) {
      if (made[i] != kNoValue) values.emplace(node.outputs[i], made[i]);
    }
  }

  std::vector<ValueId> copied_back() {
    ValueMap values;
    size_t next = 0;
    for (const GraphInput& input : part_.inputs()) {
      const bool incoming = input.role == InputRole::gradient;
      values.emplace(input.value, incoming ? e_.ones_like(y_) : outside_[next++]);
    }
    for (NodeId id : part_.order()) {
      copy(part_.node(id), e_, values,
           [&](ValueId value) { return e_.constant(part_.value(value).constant); });
    }
    std::vector<ValueId> result;
    for (size_t i = 0; i < xs_.size(); ++i) {
      const auto& outputs = part_.outputs();
      const auto found = std::find_if(outputs.begin(), outputs.end(), [&](const GraphOutput& o) {
        return o.role == OutputRole::gradient &&
               o.target == part_.value(inside_.at(named(xs_[i]))).name;
      });
      // y does not depend on it.
      result.push_back(found == outputs.end() ? e_.zeros_like(e_.input(i))
                                              : values.at(found->value));
    }
    return result;
  }

  ExpandContext& e_;
  Graph part_;
  GraphBuilder builder_;
  std::vector<std::string> xs_, names_;
  ValueId y_ = kNoValue;
  ValueMap inside_;               // from values of the graph to those of the part
  std::vector<ValueId> outside_;  // what the inputs of the part are given
};

}  // namespace

void register_gradient(OpRegistry& registry);
void register_gradient(OpRegistry& registry) {
  registry.add({.name = "Gradient",
                .domain = "ai.onnx.preview.training",
                .summary = "The gradient of the sum of a named value by other named ones, where "
                           "these are the inputs.",
                .inputs = {{"Inputs", "T1*", Arity::variadic}},
                .outputs = {{"Outputs", "T2*", Arity::variadic}},
                .attrs = {{"xs", AttributeKind::strings, true},
                          {"zs", AttributeKind::strings},
                          {"y", AttributeKind::string_, true}},
                .types = {{"T1*", kAllTypes}, {"T2*", kFloatTypes}},
                .value_names = {"xs", "zs", "y"},
                .expand = [](ExpandContext& e) { return NamedGradient(e).build(); }});
}

}  // namespace ortrain::ops
