// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::ops {
namespace {

void infer_arg_reduce(InferContext& context) {
  Shape shape = context.shape(0);
  const int64_t axis = normalize_axis(context.attrs().int_("axis"), shape.size());
  const size_t at = static_cast<size_t>(axis);
  if (shape[at].is(0)) {
    throw ShapeError(str("axis ", axis, " of shape ", shape_str(shape), " is empty"));
  }
  if (context.attrs().int_("keepdims") != 0) {
    shape[at] = 1;
  } else {
    shape.erase(shape.begin() + axis);
  }
  context.set_output(0, DType::i64, std::move(shape));
}

}  // namespace

void register_arg_reduce(OpRegistry& registry);
void register_arg_reduce(OpRegistry& registry) {
  const auto add = [&registry](const char* name, const char* summary) {
    registry.add({.name = name,
                  .since = 1,
                  .summary = summary,
                  .inputs = {{"data", "T"}},
                  .outputs = {{"reduced", "int64"}},
                  .attrs = {{"axis", int64_t{0}},
                            {"keepdims", int64_t{1}},
                            {"select_last_index", int64_t{0}}},
                  .types = {{"T", kNumericTypes}},
                  .infer = infer_arg_reduce,
                  .differentiable = false});
  };
  add("ArgMax", "Position of the first (or last) largest element along an axis; NaN is largest.");
  add("ArgMin", "Position of the first (or last) smallest element along an axis; NaN is smallest.");
}

}  // namespace ortrain::ops
