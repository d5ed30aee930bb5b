// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <numeric>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

// Operators whose bounds and sizes were attributes.
namespace ortrain::ops {
namespace {

std::vector<ValueId> split(ExpandContext& e, ValueId sizes) {
  const size_t count = e.num_outputs();
  if (count == 0) throw InvalidModelError("has no output");
  const int64_t axis = e.attrs().int_("axis");
  Attributes attributes{{"axis", axis}};
  std::vector<ValueId> inputs{e.input(0)};
  if (sizes != kNoValue) {
    inputs.push_back(sizes);
  } else {
    const size_t along = static_cast<size_t>(normalize_axis(axis, e.shape(e.input(0)).size()));
    const Dim& extent = e.shape(e.input(0))[along];
    // Since opset 18 the last part may be smaller.
    if (extent.is_constant() && extent.constant() % static_cast<int64_t>(count) != 0) {
      throw ShapeError(str("axis ", along, " of ", shape_str(e.shape(e.input(0))),
                           " cannot be split into ", count, " equal parts"));
    }
    attributes.emplace("num_outputs", static_cast<int64_t>(count));
  }
  return e.node("", "Split", std::move(inputs), std::move(attributes),
                std::vector<bool>(count, true));
}

std::vector<ValueId> expand_split_by_attribute(ExpandContext& e) {
  const auto sizes = e.attrs().optional_ints("split");
  return split(e, sizes ? e.int64s(*sizes) : kNoValue);
}

std::vector<ValueId> expand_split_by_input(ExpandContext& e) { return split(e, e.input(1)); }

std::vector<ValueId> expand_slice(ExpandContext& e) {
  const std::vector<int64_t>& starts = e.attrs().ints("starts");
  std::vector<int64_t> axes(starts.size());
  std::iota(axes.begin(), axes.end(), 0);
  return {e.op("Slice", {e.input(0), e.int64s(starts), e.int64s(e.attrs().ints("ends")),
                         e.int64s(e.attrs().optional_ints("axes").value_or(axes))})};
}

std::vector<ValueId> expand_pad(ExpandContext& e) {
  const char* pads = e.attrs().has("pads") ? "pads" : "paddings";
  const ValueId value = e.scalar(e.dtype(e.input(0)), e.attrs().float_("value"));
  return {e.op("Pad", {e.input(0), e.int64s(e.attrs().ints(pads)), value},
               {{"mode", e.attrs().string_("mode")}})};
}

}  // namespace

void register_earlier_slicing(OpRegistry& registry);
void register_earlier_slicing(OpRegistry& registry) {
  const std::map<std::string, DTypeSet> all{{"T", kAllTypes}};
  registry.add({.name = "Split",
                .since = 2,
                .until = 12,
                .summary = "The sizes are an attribute.",
                .inputs = {{"input", "T"}},
                .outputs = {{"outputs", "T", Arity::variadic}},
                .attrs = {{"axis", int64_t{0}}, {"split", AttributeKind::ints}},
                .types = all,
                .expand = expand_split_by_attribute});
  registry.add({.name = "Split",
                .since = 13,
                .until = 17,
                .summary = "Parts are equal where no sizes are given.",
                .inputs = {{"input", "T"}, {"split", "int64", Arity::optional}},
                .outputs = {{"outputs", "T", Arity::variadic}},
                .attrs = {{"axis", int64_t{0}}},
                .types = all,
                .expand = expand_split_by_input});
  registry.add({.name = "Slice",
                .since = 1,
                .until = 9,
                .summary = "Bounds and axes are attributes.",
                .inputs = {{"data", "T"}},
                .outputs = {{"output", "T"}},
                .attrs = {{"starts", AttributeKind::ints, true},
                          {"ends", AttributeKind::ints, true},
                          {"axes", AttributeKind::ints}},
                .types = all,
                .expand = expand_slice});
  const auto add_pad = [&](int since, int until, const char* pads) {
    registry.add({.name = "Pad",
                  .since = since,
                  .until = until,
                  .summary = "Pads and their value are attributes.",
                  .inputs = {{"data", "T"}},
                  .outputs = {{"output", "T"}},
                  .attrs = {{pads, AttributeKind::ints, true},
                            {"mode", std::string("constant")},
                            {"value", 0.0}},
                  .types = {{"T", kFloatTypes}},
                  .expand = expand_pad});
  };
  add_pad(1, 1, "paddings");
  add_pad(2, 10, "pads");
}

}  // namespace ortrain::ops
