// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/op_registry.h"

// Reductions whose axes are an attribute: before opset 18, sums before 13.
namespace ortrain::ops {
namespace {

std::function<std::vector<ValueId>(ExpandContext&)> expand_reduction(const char* name) {
  return [name](ExpandContext& e) {
    std::vector<ValueId> inputs{e.input(0)};
    if (const auto axes = e.attrs().optional_ints("axes")) inputs.push_back(e.int64s(*axes));
    return std::vector{e.op(name, std::move(inputs), {{"keepdims", e.attrs().int_("keepdims")}})};
  };
}

std::vector<ValueId> top_k(ExpandContext& e, ValueId k) {
  return e.node("", "TopK", {e.input(0), k}, {{"axis", e.attrs().int_("axis")}},
                {e.wants_output(0), e.wants_output(1)});
}

std::vector<ValueId> expand_top_k_by_attribute(ExpandContext& e) {
  return top_k(e, e.int64s({e.attrs().int_("k")}));
}

std::vector<ValueId> expand_top_k(ExpandContext& e) { return top_k(e, e.input(1)); }

}  // namespace

void register_earlier_reduce(OpRegistry& registry);
void register_earlier_reduce(OpRegistry& registry) {
  const auto add = [&](const char* name, int until) {
    registry.add({.name = name,
                  .since = 1,
                  .until = until,
                  .summary = "The axes are an attribute.",
                  .inputs = {{"data", "T"}},
                  .outputs = {{"reduced", "T"}},
                  .attrs = {{"axes", AttributeKind::ints}, {"keepdims", int64_t{1}}},
                  .types = {{"T", kNumericTypes}},
                  .expand = expand_reduction(name)});
  };
  add("ReduceSum", 12);
  for (const char* name : {"ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1",
                           "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"}) {
    add(name, 17);
  }
  registry.add({.name = "TopK",
                .since = 1,
                .until = 9,
                .summary = "K is an attribute.",
                .inputs = {{"X", "T"}},
                .outputs = {{"Values", "T"}, {"Indices", "int64"}},
                .attrs = {{"axis", int64_t{-1}}, {"k", AttributeKind::int_, true}},
                .types = {{"T", kFloatTypes}},
                .expand = expand_top_k_by_attribute});
  registry.add({.name = "TopK",
                .since = 10,
                .until = 10,
                .summary = "The largest elements.",
                .inputs = {{"X", "T"}, {"K", "int64"}},
                .outputs = {{"Values", "T"}, {"Indices", "int64"}},
                .attrs = {{"axis", int64_t{-1}}},
                .types = {{"T", kFloatTypes}},
                .expand = expand_top_k});
}

}  // namespace ortrain::ops
