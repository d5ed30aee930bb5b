// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

// Elementwise operators of early opsets: broadcasting as an attribute, bounds as attributes.
namespace ortrain::ops {
namespace {

using Expand = std::function<std::vector<ValueId>(ExpandContext&)>;

// B is aligned with the axes of A from `axis` on, or with the last ones.
Expand expand_aligned(const char* name) {
  return [name](ExpandContext& e) {
    const ValueId a = e.input(0);
    ValueId b = e.input(1);
    const auto axis = e.attrs().optional_int("axis");
    if (e.attrs().int_("broadcast") != 0 && axis && e.rank(b) > 0) {
      const int64_t behind = e.rank(a) - normalize_axis(*axis, e.shape(a).size()) - e.rank(b);
      if (behind < 0) {
        throw ShapeError(str("B of shape ", shape_str(e.shape(b)), " does not fit ",
                             shape_str(e.shape(a)), " from axis ", *axis, " on"));
      }
      std::vector<int64_t> axes;
      for (int64_t i = 0; i < behind; ++i) axes.push_back(e.rank(b) + i);
      if (!axes.empty()) b = e.unsqueeze(b, axes);
    }
    return std::vector{e.op(name, {a, b})};
  };
}

Expand expand_all_inputs(const char* name) {
  return [name](ExpandContext& e) {
    std::vector<ValueId> inputs;
    for (size_t i = 0; i < e.num_inputs(); ++i) inputs.push_back(e.input(i));
    return std::vector{e.op(name, std::move(inputs))};
  };
}

std::vector<ValueId> expand_clip(ExpandContext& e) {
  const DType type = e.dtype(e.input(0));
  const auto bound = [&](const char* name) {
    return e.attrs().has(name) ? e.scalar(type, e.attrs().float_(name)) : kNoValue;
  };
  return {e.op("Clip", {e.input(0), bound("min"), bound("max")})};
}

// What a model does when it is used, not trained.
std::vector<ValueId> expand_dropout(ExpandContext& e) {
  if (e.attrs().has("is_test") && e.attrs().int_("is_test") == 0) {
    throw UnsupportedError("dropout while training needs opset 12; set is_test");
  }
  if (e.wants_output(1)) throw UnsupportedError("the output 'mask' before opset 12");
  return {e.input(0)};
}

// One slope for all, or one per channel.
std::vector<ValueId> expand_channel_prelu(ExpandContext& e) {
  ValueId slope = e.input(1);
  const int64_t rank = e.rank(e.input(0));
  if (e.rank(slope) == 1 && rank > 2 && !e.shape(slope)[0].is(1)) {
    std::vector<int64_t> axes;
    for (int64_t axis = 2; axis < rank; ++axis) axes.push_back(axis - 1);
    slope = e.unsqueeze(slope, axes);
  }
  return {e.op("PRelu", {e.input(0), slope})};
}

std::vector<ValueId> expand_prelu(ExpandContext& e) {
  return {e.op("PRelu", {e.input(0), e.input(1)})};
}

// Operators that told which inputs they might overwrite.
Expand expand_unary(const char* name, std::vector<const char*> attributes) {
  return [name, attributes = std::move(attributes)](ExpandContext& e) {
    Attributes given;
    for (const char* attribute : attributes) given.emplace(attribute, e.attrs().float_(attribute));
    return std::vector{e.op(name, {e.input(0)}, std::move(given))};
  };
}

void add_unary(OpRegistry& registry) {
  const auto add = [&](const char* name, std::vector<std::pair<const char*, double>> floats = {}) {
    std::vector<FormalAttribute> attributes{{"consumed_inputs", AttributeKind::ints}};
    std::vector<const char*> names;
    for (const auto& [attribute, value] : floats) {
      attributes.push_back({attribute, value});
      names.push_back(attribute);
    }
    registry.add({.name = name,
                  .since = 1,
                  .until = 5,
                  .summary = "As since opset 6.",
                  .inputs = {{"X", "T"}},
                  .outputs = {{"Y", "T"}},
                  .attrs = std::move(attributes),
                  .types = {{"T", kFloatTypes}},
                  .expand = expand_unary(name, std::move(names))});
  };
  for (const char* name : {"Abs", "Ceil", "Exp", "Floor", "Log", "Neg", "Reciprocal", "Relu",
                           "Sigmoid", "Sqrt", "Tanh"}) {
    add(name);
  }
  add("Elu", {{"alpha", 1.0}});
  add("LeakyRelu", {{"alpha", 0.01}});
  add("HardSigmoid", {{"alpha", 0.2}, {"beta", 0.5}});
  add("Selu", {{"alpha", 1.6732}, {"gamma", 1.0507}});
}

}  // namespace

void register_earlier_elementwise(OpRegistry& registry);
void register_earlier_elementwise(OpRegistry& registry) {
  add_unary(registry);
  for (const char* name :
       {"Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Greater", "Less"}) {
    registry.add({.name = name,
                  .since = 1,
                  .until = 6,
                  .summary = "B is aligned with the axes of A from `axis` on.",
                  .inputs = {{"A", "T"}, {"B", "T"}},
                  .outputs = {{"C", "T"}},
                  .attrs = {{"axis", AttributeKind::int_},
                            {"broadcast", int64_t{0}},
                            {"consumed_inputs", AttributeKind::ints}},
                  .types = {{"T", kAllTypes}},
                  .expand = expand_aligned(name)});
  }
  for (const char* name : {"Max", "Min", "Mean", "Sum"}) {
    registry.add({.name = name,
                  .since = 1,
                  .until = 7,
                  .summary = "All inputs have one shape.",
                  .inputs = {{"data_0", "T", Arity::variadic}},
                  .outputs = {{"result", "T"}},
                  .attrs = {{"consumed_inputs", AttributeKind::ints}},
                  .types = {{"T", kFloatTypes}},
                  .expand = expand_all_inputs(name)});
  }
  registry.add({.name = "Clip",
                .since = 1,
                .until = 10,
                .summary = "The bounds are attributes.",
                .inputs = {{"input", "T"}},
                .outputs = {{"output", "T"}},
                .attrs = {{"min", AttributeKind::float_},
                          {"max", AttributeKind::float_},
                          {"consumed_inputs", AttributeKind::ints}},
                .types = {{"T", kFloatTypes}},
                .expand = expand_clip});
  const auto add_dropout = [&](int since, int until, std::vector<FormalAttribute> attributes) {
    attributes.push_back({"ratio", 0.5});
    registry.add({.name = "Dropout",
                  .since = since,
                  .until = until,
                  .summary = "Of a model in use: the input.",
                  .inputs = {{"data", "T"}},
                  .outputs = {{"output", "T"}, {"mask", "T", Arity::optional}},
                  .attrs = std::move(attributes),
                  .types = {{"T", kFloatTypes}},
                  .expand = expand_dropout});
  };
  add_dropout(1, 6, {{"is_test", int64_t{0}}, {"consumed_inputs", AttributeKind::ints}});
  add_dropout(7, 11, {});
  const auto add_prelu = [&](int since, int until, auto expand) {
    registry.add({.name = "PRelu",
                  .since = since,
                  .until = until,
                  .summary = "One slope, or one per channel.",
                  .inputs = {{"X", "T"}, {"slope", "T"}},
                  .outputs = {{"Y", "T"}},
                  .attrs = {{"consumed_inputs", AttributeKind::ints}},
                  .types = {{"T", kFloatTypes}},
                  .expand = expand});
  };
  add_prelu(1, 6, expand_channel_prelu);
  add_prelu(7, 8, expand_prelu);
}

}  // namespace ortrain::ops
