// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/graph_compare.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

class Comparison {
 public:
  Comparison(const Graph& a, const Graph& b, const CompareOptions& options)
      : a_(a), b_(b), options_(options), symbols_(input_symbols(a)) {}

  std::string run() {
    if (options_.names && a_.name != b_.name) return differ("graph name", a_.name, b_.name);
    std::string difference = compare_inputs();
    if (difference.empty()) difference = compare_nodes();
    if (difference.empty()) difference = compare_outputs();
    return difference;
  }

 private:
  template <typename T>
  static std::string differ(const std::string& what, const T& a, const T& b) {
    return str(what, ": '", a, "' and '", b, "'");
  }

  std::string compare_inputs() {
    if (a_.inputs().size() != b_.inputs().size()) {
      return differ("number of inputs", a_.inputs().size(), b_.inputs().size());
    }
    for (size_t i = 0; i < a_.inputs().size(); ++i) {
      const GraphInput& left = a_.inputs()[i];
      const GraphInput& right = b_.inputs()[i];
      const std::string what = str("input ", i);
      const std::string& left_name = a_.value(left.value).name;
      const std::string& right_name = b_.value(right.value).name;
      if (left_name != right_name) return differ(what + " name", left_name, right_name);
      if (left.role != right.role) return what + ": different roles";
      if (left.target != right.target) return differ(what + " target", left.target, right.target);
      if (left.requires_grad != right.requires_grad) return what + ": different requires_grad";
      if (std::string difference = bind(what, left.value, right.value); !difference.empty()) {
        return difference;
      }
    }
    return "";
  }

  std::string compare_nodes() {
    if (a_.order().size() != b_.order().size()) {
      return differ("number of nodes", a_.order().size(), b_.order().size());
    }
    for (size_t i = 0; i < a_.order().size(); ++i) {
      const Node& left = a_.node(a_.order()[i]);
      const Node& right = b_.node(b_.order()[i]);
      const std::string what = str("node ", i, " ", Graph::context(left));
      if (left.op != right.op || left.domain != right.domain) {
        return differ(str("node ", i), Graph::context(left), Graph::context(right));
      }
      if (options_.names && left.name != right.name) {
        return differ(what + "name", left.name, right.name);
      }
      if (left.phase != right.phase) return what + "different phases";
      if (left.checkpoint != right.checkpoint) return what + "different checkpoints";
      if (!operator_equal(left.attributes, right.attributes)) return what + "different attributes";
      if (left.inputs.size() != right.inputs.size()) return what + "different numbers of inputs";
      if (left.outputs.size() != right.outputs.size()) return what + "different numbers of outputs";
      for (size_t j = 0; j < left.inputs.size(); ++j) {
        std::string difference =
            compare_uses(str(what, "input ", j), left.inputs[j], right.inputs[j]);
        if (!difference.empty()) return difference;
      }
      for (size_t j = 0; j < left.outputs.size(); ++j) {
        std::string difference = bind(str(what, "output ", j), left.outputs[j], right.outputs[j]);
        if (!difference.empty()) return difference;
      }
    }
    return "";
  }

  std::string compare_outputs() {
    if (a_.outputs().size() != b_.outputs().size()) {
      return differ("number of outputs", a_.outputs().size(), b_.outputs().size());
    }
    for (size_t i = 0; i < a_.outputs().size(); ++i) {
      const GraphOutput& left = a_.outputs()[i];
      const GraphOutput& right = b_.outputs()[i];
      const std::string what = str("output ", i);
      if (left.name != right.name) return differ(what + " name", left.name, right.name);
      if (left.role != right.role) return what + ": different roles";
      if (left.target != right.target) return differ(what + " target", left.target, right.target);
      std::string difference = compare_uses(what, left.value, right.value);
      if (!difference.empty()) return difference;
    }
    return "";
  }

  // The two values are defined at the same place.
  std::string bind(const std::string& what, ValueId a, ValueId b) {
    if ((a == kNoValue) != (b == kNoValue)) return what + " is absent in one graph";
    if (a == kNoValue) return "";
    twins_[a] = b;
    const Value& left = a_.value(a);
    const Value& right = b_.value(b);
    if (options_.names && left.name != right.name) {
      return differ(what + " name", left.name, right.name);
    }
    if (left.dtype != right.dtype) {
      return differ(what + " type", name_of(left.dtype), name_of(right.dtype));
    }
    if (!shapes_agree(left.shape, right.shape, symbols_)) {
      return differ(what + " shape", shape_str(left.shape), shape_str(right.shape));
    }
    return "";
  }

  std::string compare_uses(const std::string& what, ValueId a, ValueId b) {
    if ((a == kNoValue) != (b == kNoValue)) return what + " is absent in one graph";
    if (a == kNoValue) return "";
    const Value& left = a_.value(a);
    const Value& right = b_.value(b);
    if (left.kind != right.kind) return differ(what, left.name, right.name);
    if (left.kind == ValueKind::constant) {
      if (options_.names && left.name != right.name) return differ(what, left.name, right.name);
      return left.constant.equals(right.constant)
                 ? ""
                 : str(what, ": different constants '", left.name, "' and '", right.name, "'");
    }
    auto twin = twins_.find(a);
    const bool same = twin != twins_.end() && twin->second == b;
    return same ? "" : differ(what, left.name, right.name);
  }

  const Graph& a_;
  const Graph& b_;
  const CompareOptions& options_;
  const std::set<std::string> symbols_;
  std::unordered_map<ValueId, ValueId> twins_;  // of a -> of b
};

}  // namespace

std::set<std::string> input_symbols(const Graph& graph) {
  std::set<std::string> symbols;
  for (const GraphInput& input : graph.inputs()) {
    for (const Dim& dim : graph.value(input.value).shape) symbols.merge(dim.symbols());
  }
  return symbols;
}

bool extents_agree(const Dim& a, const Dim& b, const std::set<std::string>& free_symbols) {
  if (a == b) return true;
  if ((a - b).is_constant()) return false;
  std::set<std::string> symbols = a.symbols();
  symbols.merge(b.symbols());
  return !std::includes(free_symbols.begin(), free_symbols.end(), symbols.begin(), symbols.end());
}

bool shapes_agree(const Shape& a, const Shape& b, const std::set<std::string>& free_symbols) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [&](const Dim& x, const Dim& y) { return extents_agree(x, y, free_symbols); });
}

std::string first_difference(const Graph& a, const Graph& b, const CompareOptions& options) {
  return Comparison(a, b, options).run();
}

}  // namespace ortrain
