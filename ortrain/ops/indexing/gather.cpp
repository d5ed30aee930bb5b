// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

// `data` with axis `axis` replaced by the axes of `indices`.
Shape gathered(const Shape& data, const Shape& indices, int64_t axis) {
  Shape shape(data.begin(), data.begin() + axis);
  shape.insert(shape.end(), indices.begin(), indices.end());
  shape.insert(shape.end(), data.begin() + axis + 1, data.end());
  checked_product(shape);
  return shape;
}

void infer_gather(InferContext& context) {
  const Shape& data = context.shape(0);
  const int64_t axis = normalize_axis(context.attrs().int_("axis"), data.size());
  context.set_output(0, context.dtype(0), gathered(data, context.shape(1), axis));

  const std::optional<std::vector<int64_t>> indices = context.known_ints(1);
  if (!context.known(0) || !indices || context.rank(1) > 1) return;
  const int64_t extent = static_cast<int64_t>(context.known(0)->size());
  std::vector<Dim> contents;
  for (int64_t index : *indices) {
    if (index < -extent || index >= extent) {
      throw IndexError(str("index ", index, " is out of range for an extent of ", extent));
    }
    contents.push_back(
        (*context.known(0))[static_cast<size_t>(index < 0 ? index + extent : index)]);
  }
  context.set_known(0, std::move(contents));
}

void gather_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  const int64_t axis = normalize_axis(g.attrs().int_("axis"), g.shape(g.input(0)).size());
  g.set_input_grad(0, g.own("GatherGrad", {g.output_grad(0), g.input(1), g.shape_of(g.input(0))},
                            {{"axis", axis}}));
}

void infer_gather_grad(InferContext& context) {
  const Shape shape = required_known(context, 2, "shape");
  const int64_t axis = normalize_axis(context.attrs().int_("axis"), shape.size());
  const Shape expected = gathered(shape, context.shape(1), axis);
  const Shape& dy = context.shape(0);
  bool fits = dy.size() == expected.size();
  for (size_t i = 0; fits && i < dy.size(); ++i) {
    fits = !dy[i].is_constant() || !expected[i].is_constant() || dy[i] == expected[i];
  }
  if (!fits) {
    throw ShapeError(
        str("the gradient has the shape ", shape_str(dy), ", expected ", shape_str(expected)));
  }
  context.set_output(0, context.dtype(0), shape);
}

void gather_grad_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  g.set_input_grad(
      0, g.op("Gather", {g.output_grad(0), g.input(1)}, {{"axis", g.attrs().int_("axis")}}));
}

}  // namespace

void register_gather(OpRegistry& registry);
void register_gather(OpRegistry& registry) {
  registry.add({.name = "Gather",
                .since = 1,
                .summary = "Slices of an axis, picked by index; negative indices count from the "
                           "end.",
                .inputs = {{"data", "T"}, {"indices", "Tind"}},
                .outputs = {{"output", "T"}},
                .attrs = {{"axis", int64_t{0}}},
                .types = {{"T", kAllTypes}, {"Tind", kIndexTypes}},
                .infer = infer_gather,
                .gradient = gather_gradient,
                .looks_up = true});
  registry.add({.name = "GatherGrad",
                .domain = std::string(kOrtrainDomain),
                .summary = "Gradient of Gather: zeros of `shape`, to which every slice of dy is "
                           "added where its index points.",
                .inputs = {{"dy", "T"}, {"indices", "Tind"}, {"shape", "int64"}},
                .outputs = {{"dx", "T"}},
                .attrs = {{"axis", int64_t{0}}},
                .types = {{"T", kFloatTypes}, {"Tind", kIndexTypes}},
                .infer = infer_gather_grad,
                .gradient = gather_grad_gradient});
}

}  // namespace ortrain::ops
