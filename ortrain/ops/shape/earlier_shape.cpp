// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/op_registry.h"

// Operators whose axes, shape or scales were attributes.
namespace ortrain::ops {
namespace {

std::vector<ValueId> expand_squeeze(ExpandContext& e) {
  const auto axes = e.attrs().optional_ints("axes");
  return {axes ? e.squeeze(e.input(0), *axes) : e.op("Squeeze", {e.input(0)})};
}

std::vector<ValueId> expand_unsqueeze(ExpandContext& e) {
  return {e.unsqueeze(e.input(0), e.attrs().ints("axes"))};
}

std::vector<ValueId> expand_reshape(ExpandContext& e) {
  return {e.reshape(e.input(0), e.attrs().ints("shape"))};
}

ValueId resized(ExpandContext& e, ValueId scales) {
  return e.op("Resize", {e.input(0), kNoValue, scales},
              {{"mode", e.attrs().string_("mode")},
               {"coordinate_transformation_mode", std::string("asymmetric")},
               {"nearest_mode", std::string("floor")}});
}

std::vector<ValueId> expand_upsample(ExpandContext& e) {
  const std::vector<double>& given = e.attrs().floats("scales");
  const std::vector<float> scales(given.begin(), given.end());
  const int64_t count = static_cast<int64_t>(scales.size());
  return {resized(e, e.constant(TensorData::from_values(DType::f32, {count}, scales)))};
}

std::vector<ValueId> expand_resize(ExpandContext& e) { return {resized(e, e.input(1))}; }

}  // namespace

void register_earlier_shape(OpRegistry& registry);
void register_earlier_shape(OpRegistry& registry) {
  const std::map<std::string, DTypeSet> all{{"T", kAllTypes}};
  registry.add({.name = "Squeeze",
                .since = 1,
                .until = 12,
                .summary = "The axes are an attribute.",
                .inputs = {{"data", "T"}},
                .outputs = {{"squeezed", "T"}},
                .attrs = {{"axes", AttributeKind::ints}},
                .types = all,
                .expand = expand_squeeze});
  registry.add({.name = "Unsqueeze",
                .since = 1,
                .until = 12,
                .summary = "The axes are an attribute.",
                .inputs = {{"data", "T"}},
                .outputs = {{"expanded", "T"}},
                .attrs = {{"axes", AttributeKind::ints, true}},
                .types = all,
                .expand = expand_unsqueeze});
  registry.add(
      {.name = "Reshape",
       .since = 1,
       .until = 4,
       .summary = "The shape is an attribute.",
       .inputs = {{"data", "T"}},
       .outputs = {{"reshaped", "T"}},
       .attrs = {{"shape", AttributeKind::ints, true}, {"consumed_inputs", AttributeKind::ints}},
       .types = all,
       .expand = expand_reshape});
  registry.add(
      {.name = "Upsample",
       .since = 7,
       .until = 8,
       .summary = "The scales are an attribute.",
       .inputs = {{"X", "T"}},
       .outputs = {{"Y", "T"}},
       .attrs = {{"mode", std::string("nearest")}, {"scales", AttributeKind::floats, true}},
       .types = all,
       .expand = expand_upsample});
  registry.add({.name = "Upsample",
                .since = 9,
                .summary = "Resize by scales, each output at the input position below it.",
                .inputs = {{"X", "T"}, {"scales", "float32"}},
                .outputs = {{"Y", "T"}},
                .attrs = {{"mode", std::string("nearest")}},
                .types = all,
                .expand = expand_resize});
  registry.add({.name = "Resize",
                .since = 10,
                .until = 10,
                .summary = "By scales, each output at the input position below it.",
                .inputs = {{"X", "T"}, {"scales", "float32"}},
                .outputs = {{"Y", "T"}},
                .attrs = {{"mode", std::string("nearest")}},
                .types = all,
                .expand = expand_resize});
}

}  // namespace ortrain::ops
