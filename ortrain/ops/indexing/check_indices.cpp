// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::ops {
namespace {

void infer_check_indices(InferContext& context) {
  if (!context.shape(1).empty()) {
    throw ShapeError(str("'extent' is a scalar, not of shape ", shape_str(context.shape(1))));
  }
  context.set_output(0, context.dtype(0), context.shape(0));
}

std::vector<ValueId> check_indices_form(ExpandContext& e) {
  return {e.unary("Identity", e.input(0))};
}

}  // namespace

void register_check_indices(OpRegistry& registry);
void register_check_indices(OpRegistry& registry) {
  registry.add({.name = "CheckIndices",
                .domain = std::string(kOrtrainDomain),
                .summary = "The indices themselves; one outside of [0, extent) is an IndexError, "
                           "which says `message` where there is one. "
                           "For what counts no index from the end, as operators of ONNX do.",
                .inputs = {{"indices", "I"}, {"extent", "int64"}},
                .outputs = {{"checked", "I"}},
                .attrs = {{"message", std::string()}},
                .types = {{"I", kIndexTypes}},
                .infer = infer_check_indices,
                .differentiable = false,
                .standard_form = check_indices_form});
}

}  // namespace ortrain::ops
