// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"
#include "ortrain/ops/slicing/slice_region.h"

namespace ortrain::ops {
namespace {

// Slices of an input of shape `shape`, from the inputs at `first` (starts, ends, axes, steps).
std::vector<AxisSlice> read_slices(const InferContext& context, const Shape& shape, size_t first) {
  std::optional<std::vector<int64_t>> axes, steps;
  if (context.has_input(first + 2)) axes = required_ints(context, first + 2, "axes");
  if (context.has_input(first + 3)) steps = required_ints(context, first + 3, "steps");
  return slice_axes(shape, required_known(context, first, "starts"),
                    required_known(context, first + 1, "ends"), axes, steps);
}

void infer_slice(InferContext& context) {
  const std::vector<AxisSlice> slices = read_slices(context, context.shape(0), 1);
  Shape shape;
  for (const AxisSlice& slice : slices) shape.push_back(slice.count);
  context.set_output(0, context.dtype(0), std::move(shape));
  if (!context.known(0) || slices.size() != 1) return;
  const AxisSlice& slice = slices[0];
  if (!slice.start.is_constant() || !slice.count.is_constant()) return;
  std::vector<Dim> contents;
  for (int64_t i = 0; i < slice.count.constant(); ++i) {
    contents.push_back(
        (*context.known(0))[static_cast<size_t>(slice.start.constant() + i * slice.step)]);
  }
  context.set_known(0, std::move(contents));
}

void slice_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  g.set_input_grad(0, g.own("SliceGrad", {g.output_grad(0), g.shape_of(g.input(0)), g.input(1),
                                          g.input(2), g.input(3), g.input(4)}));
}

void infer_slice_grad(InferContext& context) {
  const Shape shape = required_known(context, 1, "shape");
  const std::vector<AxisSlice> slices = read_slices(context, shape, 2);
  const Shape& dy = context.shape(0);
  bool fits = dy.size() == shape.size();
  for (size_t i = 0; fits && i < dy.size(); ++i) {
    fits = !dy[i].is_constant() || !slices[i].count.is_constant() || dy[i] == slices[i].count;
  }
  if (!fits) {
    throw ShapeError(str("shape ", shape_str(dy), " is no such slice of ", shape_str(shape)));
  }
  context.set_output(0, context.dtype(0), shape);
}

void slice_grad_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  g.set_input_grad(
      0, g.op("Slice", {g.output_grad(0), g.input(2), g.input(3), g.input(4), g.input(5)}));
}

}  // namespace

void register_slice(OpRegistry& registry);
void register_slice(OpRegistry& registry) {
  registry.add({.name = "Slice",
                .since = 10,
                .summary = "A box of the input, with steps of either sign.",
                .inputs = {{"data", "T"},
                           {"starts", "Tind"},
                           {"ends", "Tind"},
                           {"axes", "Tind", Arity::optional},
                           {"steps", "Tind", Arity::optional}},
                .outputs = {{"output", "T"}},
                .types = {{"T", kAllTypes}, {"Tind", kIndexTypes}},
                .infer = infer_slice,
                .gradient = slice_gradient,
                .looks_up = true});
  registry.add({.name = "SliceGrad",
                .domain = std::string(kOrtrainDomain),
                .summary = "Zeros of `shape` with dy where Slice(starts, ends, axes, steps) of a "
                           "tensor of that shape would read.",
                .inputs = {{"dy", "T"},
                           {"shape", "int64"},
                           {"starts", "Tind"},
                           {"ends", "Tind"},
                           {"axes", "Tind", Arity::optional},
                           {"steps", "Tind", Arity::optional}},
                .outputs = {{"dx", "T"}},
                .types = {{"T", kAllTypes}, {"Tind", kIndexTypes}},
                .infer = infer_slice_grad,
                .gradient = slice_grad_gradient});
}

}  // namespace ortrain::ops
