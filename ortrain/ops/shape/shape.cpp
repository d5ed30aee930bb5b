// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

// Shape's bounds count from the end when negative and are clamped to [0, rank].
int64_t clamp_bound(int64_t bound, int64_t rank) {
  if (bound < 0) bound += rank;
  return std::min(std::max<int64_t>(bound, 0), rank);
}

void infer_shape(InferContext& context) {
  const int64_t rank = context.rank(0);
  const int64_t start = clamp_bound(context.attrs().int_("start"), rank);
  const int64_t end =
      std::max(start, clamp_bound(context.attrs().optional_int("end").value_or(rank), rank));
  const Shape& shape = context.shape(0);
  context.set_output(0, DType::i64, {Dim(end - start)});
  context.set_known(0, std::vector<Dim>(shape.begin() + start, shape.begin() + end));
}

void infer_size(InferContext& context) {
  context.set_output(0, DType::i64, {});
  context.set_known(0, {checked_product(context.shape(0))});
}

}  // namespace

void register_shape(OpRegistry& registry);
void register_shape(OpRegistry& registry) {
  registry.add({.name = "Shape",
                .since = 1,
                .summary = "The extents of a tensor, from axis start up to axis end.",
                .inputs = {{"data", "T"}},
                .outputs = {{"shape", "int64"}},
                .attrs = {{"start", int64_t{0}}, {"end", AttributeKind::int_}},
                .types = {{"T", kAllTypes}},
                .infer = infer_shape,
                .differentiable = false});
  registry.add({.name = "Size",
                .since = 1,
                .summary = "The number of elements of a tensor.",
                .inputs = {{"data", "T"}},
                .outputs = {{"size", "int64"}},
                .types = {{"T", kAllTypes}},
                .infer = infer_size,
                .differentiable = false});
}

}  // namespace ortrain::ops
