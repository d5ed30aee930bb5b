// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/op_registry.h"

// Before opset 14 the number of outputs, or a flag, says whether a model is being trained.
namespace ortrain::ops {
namespace {

std::vector<ValueId> expand_batch_norm(ExpandContext& e) {
  const bool trains =
      e.wants_output(1) || (e.attrs().has("is_test") && e.attrs().int_("is_test") == 0);
  if (trains) throw UnsupportedError("statistics of the batch before opset 14");
  if (e.attrs().has("spatial") && e.attrs().int_("spatial") == 0) {
    throw UnsupportedError("statistics of each element; spatial must be 1");
  }
  return {e.op("BatchNormalization", {e.input(0), e.input(1), e.input(2), e.input(3), e.input(4)},
               {{"epsilon", e.attrs().float_("epsilon")}})};
}

}  // namespace

void register_earlier_batch_norm(OpRegistry& registry);
void register_earlier_batch_norm(OpRegistry& registry) {
  const auto add = [&](int since, int until, std::vector<FormalAttribute> attributes) {
    attributes.push_back({"epsilon", 1e-5});
    attributes.push_back({"momentum", 0.9});
    registry.add({.name = "BatchNormalization",
                  .since = since,
                  .until = until,
                  .summary = "With the given statistics.",
                  .inputs = {{"X", "T"}, {"scale", "T"}, {"B", "T"}, {"mean", "T"}, {"var", "T"}},
                  .outputs = {{"Y", "T"},
                              {"mean", "T", Arity::optional},
                              {"var", "T", Arity::optional},
                              {"saved_mean", "T", Arity::optional},
                              {"saved_var", "T", Arity::optional}},
                  .attrs = std::move(attributes),
                  .types = {{"T", kFloatTypes}},
                  .expand = expand_batch_norm});
  };
  const FormalAttribute spatial{"spatial", int64_t{1}};
  add(1, 6, {spatial, {"is_test", int64_t{0}}, {"consumed_inputs", AttributeKind::ints}});
  add(7, 8, {spatial});
  add(9, 13, {});
}

}  // namespace ortrain::ops
