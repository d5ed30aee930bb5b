// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

// Before opset 13 all axes from `axis` on are taken for one.
namespace ortrain::ops {
namespace {

std::vector<ValueId> expand_flattened(ExpandContext& e, const char* name) {
  const ValueId x = e.input(0);
  const int64_t rank = e.rank(x);
  const int64_t given = e.attrs().int_("axis");
  const int64_t axis = given == rank ? rank : normalize_axis(given, static_cast<size_t>(rank));
  if (axis + 1 == rank) return {e.op(name, {x}, {{"axis", int64_t{-1}}})};
  const ValueId flat = e.op("Flatten", {x}, {{"axis", axis}});
  return {e.reshape_like(e.op(name, {flat}, {{"axis", int64_t{-1}}}), x)};
}

}  // namespace

void register_earlier_softmax(OpRegistry& registry);
void register_earlier_softmax(OpRegistry& registry) {
  for (const char* name : {"Softmax", "LogSoftmax", "Hardmax"}) {
    registry.add({.name = name,
                  .since = 1,
                  .until = 12,
                  .summary = "All axes from `axis` on are taken for one.",
                  .inputs = {{"input", "T"}},
                  .outputs = {{"output", "T"}},
                  .attrs = {{"axis", int64_t{1}}},
                  .types = {{"T", kFloatTypes}},
                  .expand = [name](ExpandContext& e) { return expand_flattened(e, name); }});
  }
}

}  // namespace ortrain::ops
