// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ortrain/base/dtype.h"
#include "ortrain/ir/attribute.h"

namespace ortrain {

class InferContext;
class GradContext;
class NodeSpec;
class ExprEmitter;
class ExpandContext;

enum class Arity { single, optional, variadic };

// One formal input or output. `type` names a type variable of OpDef::types ("T"), or an element
// type itself ("int64", "bool").
struct FormalValue {
  std::string name;
  std::string type;
  Arity arity = Arity::single;
};

enum class AttributeKind { int_, float_, string_, ints, floats, strings, tensor };

struct FormalAttribute {
  FormalAttribute(std::string name, Attribute default_value)
      : name(std::move(name)), default_value(std::move(default_value)), has_default(true) {}
  // No default: absent unless given.
  FormalAttribute(std::string name, AttributeKind kind, bool required = false)
      : name(std::move(name)), kind(kind), required(required) {}

  std::string name;
  Attribute default_value;
  bool has_default = false;
  AttributeKind kind = AttributeKind::int_;  // when there is no default
  bool required = false;
};

enum class Differentiability {
  rule,     // `gradient` builds it
  none,     // by definition: integer or boolean results, shapes
  missing,  // it has one, we have no rule
};

// What mixed precision makes of an operator's float inputs; see `ortrain/passes/mixed_precision.h`.
enum class Precision {
  promote,  // the widest type among them
  allow,    // 16 bits: products, which gain by it and add up in float
  deny,     // float32: what loses by it (exponentials, sums over axes, norms, losses)
  keep,     // the types that they have without mixed precision
};

// Schema, inference and gradient of one operator.
struct OpDef {
  std::string name;
  std::string domain;   // "" or "ortrain"
  int since = 1;        // first opset version with this meaning
  int until = 0;        // last opset version with it, where a later one has another; needs `expand`
  std::string summary;  // one sentence; for `ortrain` operators with the formula
  std::vector<FormalValue> inputs;
  std::vector<FormalValue> outputs;
  std::vector<FormalAttribute> attrs;
  std::map<std::string, DTypeSet> types;
  Precision precision = Precision::promote;
  // Sets dtype and shape of every wanted output; throws ShapeError or DTypeError. It runs on
  // symbolic extents when a graph is built, and again on concrete ones when it is planned.
  std::function<void(InferContext&)> infer;
  // Builds the gradients of the inputs that need one; see GradContext.
  std::function<void(GradContext&)> gradient;
  bool differentiable = true;         // false: no gradient by definition
  bool draws_random_numbers = false;  // never folded, merged or computed at plan time
  bool in_files = true;               // false: it names what this process alone knows
  // Elementwise operators with one output: appends the formula to an expression program and
  // returns the register of the result. Kernels and fusion derive from it; see expr_builder.h.
  std::function<int32_t(ExprEmitter&)> expression = nullptr;

  // The input whose leading axes, up to attribute `axis` where there is one, are a batch: every
  // result for a leading index comes from the same index of that input and from all of the others.
  // -1: none. Elementwise operators need not say it.
  int row_operand = -1;

  // Operations of the matrix products in a node of concrete shapes, two per multiplication (see
  // ir/flops.h), for profiles. Null: it has none.
  std::function<double(const NodeSpec&)> flops = nullptr;
  // Of input 0 only as many bytes are read as the outputs have.
  bool looks_up = false;

  // Attributes that name values of the graph around a node; see
  // `ortrain/ops/training/gradient.cpp`.
  std::vector<std::string> value_names = {};

  // Operators that stand for others, in place of `infer` and kernels: builds these and returns the
  // outputs; see ExpandContext. A graph holds
  // a node of such an operator only if it has `infer` too and is made for a file; see
  // GraphBuilder::set_keeps_composites.
  std::function<std::vector<int32_t>(ExpandContext&)> expand = nullptr;

  // For operators of domain "ortrain": builds the same from standard ones, for files that others
  // read, and returns the outputs. Null: there is no such form.
  std::function<std::vector<int32_t>(ExpandContext&)> standard_form = nullptr;

  Differentiability differentiability() const {
    if (!differentiable) return Differentiability::none;
    return gradient ? Differentiability::rule : Differentiability::missing;
  }
  bool names_values(std::string_view attribute) const {
    return std::find(value_names.begin(), value_names.end(), attribute) != value_names.end();
  }
  const FormalAttribute* find_attribute(const std::string& attribute) const;
  // The formal value of input or output `index`; variadic ones repeat. Null when out of range.
  const FormalValue* formal_input(size_t index) const;
  const FormalValue* formal_output(size_t index) const;
};

}  // namespace ortrain
