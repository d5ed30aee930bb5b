// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

std::vector<ValueId> expand_hardmax(ExpandContext& e) {
  const ValueId x = e.input(0);
  const int64_t axis = normalize_axis(e.attrs().int_("axis"), e.shape(x).size());
  const ValueId first = e.op("ArgMax", {x}, {{"axis", axis}, {"keepdims", int64_t{0}}});
  const ValueId values = e.cast(e.constant(TensorData::int64s({0, 1})), e.dtype(x));
  return {e.op("OneHot", {first, e.extent_of(x, axis), values}, {{"axis", axis}})};
}

}  // namespace

void register_hardmax(OpRegistry& registry);
void register_hardmax(OpRegistry& registry) {
  registry.add({.name = "Hardmax",
                .since = 13,
                .summary = "1 at the first largest element along an axis, else 0.",
                .inputs = {{"input", "T"}},
                .outputs = {{"output", "T"}},
                .attrs = {{"axis", int64_t{-1}}},
                .types = {{"T", kFloatTypes}},
                .expand = expand_hardmax});
}

}  // namespace ortrain::ops
