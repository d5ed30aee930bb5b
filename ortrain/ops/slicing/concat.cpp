// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

void infer_concat(InferContext& context) {
  Shape shape = context.shape(0);
  const size_t axis =
      static_cast<size_t>(normalize_axis(context.attrs().int_("axis"), shape.size()));
  bool all_known = shape.size() == 1;
  std::vector<Dim> contents;
  for (size_t i = 0; i < context.num_inputs(); ++i) {
    const Shape& part = context.shape(i);
    if (part.size() != shape.size()) {
      throw ShapeError(str("input ", i, " has the shape ", shape_str(part), ", the first one has ",
                           shape_str(context.shape(0))));
    }
    for (size_t k = 0; k < shape.size(); ++k) {
      if (i == 0) continue;
      if (k == axis) {
        shape[k] = checked_add(shape[k], part[k]);
        continue;
      }
      if (shape[k].is_constant() && part[k].is_constant() && !(shape[k] == part[k])) {
        throw ShapeError(str("input ", i, " has the shape ", shape_str(part),
                             ", which does not fit ", shape_str(context.shape(0)), " beside axis ",
                             axis));
      }
      shape[k] = same_extent(shape[k], part[k]);
    }
    all_known = all_known && context.known(i).has_value() &&
                contents.size() + context.known(i)->size() <= kMaxKnown;
    if (all_known) {
      contents.insert(contents.end(), context.known(i)->begin(), context.known(i)->end());
    }
  }
  checked_product(shape);
  context.set_output(0, context.dtype(0), std::move(shape));
  if (all_known) context.set_known(0, std::move(contents));
}

void concat_gradient(GradContext& g) {
  const int64_t axis = normalize_axis(g.attrs().int_("axis"), g.shape(g.output(0)).size());
  std::vector<ValueId> sizes;
  std::vector<bool> wanted;
  for (size_t i = 0; i < g.num_inputs(); ++i) {
    sizes.push_back(extents_at(g, g.input(i), {axis}));
    wanted.push_back(g.needs_grad(i));
  }
  const std::vector<ValueId> parts =
      g.node("", "Split", {g.output_grad(0), concat_ints(g, sizes)}, {{"axis", axis}}, wanted);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (g.needs_grad(i)) g.set_input_grad(i, parts[i]);
  }
}

// A file may ask for any number; no node lists that many outputs.
constexpr int64_t kMaxParts = 65536;

Shape split_equally(const Dim& extent, int64_t parts) {
  if (parts <= 0) throw InvalidModelError("Split needs one output at least");
  if (parts > kMaxParts) throw UnsupportedError(str("a split into ", parts, " parts"));
  Dim chunk = ceil_div(extent, Dim(parts));
  if (!extent.is_constant()) {
    const Dim exact = floor_div(extent, Dim(parts));
    if (exact * Dim(parts) == extent) chunk = exact;
  }
  Shape sizes(static_cast<size_t>(parts - 1), chunk);
  sizes.push_back(extent - chunk * Dim(parts - 1));
  if (sizes.back().is_constant() && sizes.back().constant() < 0) {
    throw ShapeError(str("an extent of ", extent.str(), " cannot be split into ", parts, " parts"));
  }
  return sizes;
}

void infer_split(InferContext& context) {
  const Shape& from = context.shape(0);
  const size_t axis =
      static_cast<size_t>(normalize_axis(context.attrs().int_("axis"), from.size()));
  const std::optional<int64_t> num_outputs = context.attrs().optional_int("num_outputs");
  Shape sizes;
  if (context.has_input(1)) {
    if (num_outputs) throw InvalidModelError("both input 'split' and 'num_outputs' are given");
    sizes = required_known(context, 1, "split");
    if (context.rank(1) != 1) throw ShapeError("input 'split' must have rank 1");
    Dim sum(0);
    for (const Dim& size : sizes) {
      if (size.is_constant() && size.constant() < 0) {
        throw ShapeError(str("input 'split' holds a negative extent: ", shape_str(sizes)));
      }
      sum = checked_add(sum, size);
    }
    if (sum.is_constant() && from[axis].is_constant() && !(sum == from[axis])) {
      throw ShapeError(str("the parts ", shape_str(sizes), " do not add up to the extent ",
                           from[axis].str(), " of axis ", axis));
    }
  } else {
    sizes = split_equally(from[axis],
                          num_outputs.value_or(static_cast<int64_t>(context.num_outputs())));
  }
  // Outputs that nobody wants may be missing at the end.
  if (sizes.size() < context.num_outputs()) {
    throw InvalidModelError(str(sizes.size(), " parts for ", context.num_outputs(), " outputs"));
  }
  size_t offset = 0;
  for (size_t i = 0; i < context.num_outputs(); ++i) {
    Shape shape = from;
    shape[axis] = sizes[i];
    context.set_output(i, context.dtype(0), std::move(shape));
    if (!context.known(0) || !sizes[i].is_constant()) {
      offset = SIZE_MAX;  // later parts start at an unknown place
    } else if (offset != SIZE_MAX && from.size() == 1) {
      const std::vector<Dim>& whole = *context.known(0);
      const auto size = static_cast<size_t>(sizes[i].constant());
      // Beside a symbolic part the sizes were not added up.
      if (size > whole.size() - offset) {
        throw ShapeError(str("the parts ", shape_str(sizes), " are longer than the extent ",
                             from[axis].str(), " of axis ", axis));
      }
      const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(offset);
      context.set_known(i, std::vector<Dim>(begin, begin + sizes[i].constant()));
      offset += size;
    }
  }
}

// Each part that nobody wants is a node more in a gradient, where their extents are not known.
constexpr size_t kMostUnwanted = 1024;

// The extents of the parts of a Split.
Shape parts_of(GradContext& g, const Dim& extent) {
  if (g.has_input(1)) {
    const std::optional<std::vector<Dim>>& listed = g.value(g.input(1)).known;
    check(listed.has_value(), "the parts are known since they were inferred");
    return *listed;
  }
  const std::optional<int64_t> given = g.attrs().optional_int("num_outputs");
  return split_equally(extent, given.value_or(static_cast<int64_t>(g.num_outputs())));
}

// The gradients of parts of known extents, with zeros in one piece for those in a row that nobody
// wants.
std::vector<ValueId> joined_gradients(GradContext& g, int64_t axis, const Shape& parts) {
  std::vector<ValueId> gradients;
  int64_t begin = 0, end = 0;  // of what is unwanted
  const auto fill = [&] {
    if (begin == end) return;
    const ValueId unwanted =
        g.op("Slice", {g.input(0), g.int64s({begin}), g.int64s({end}), g.int64s({axis})});
    gradients.push_back(g.zeros_like(unwanted));
  };
  for (size_t i = 0; i < parts.size(); ++i) {
    if (g.has_output_grad(i)) {
      fill();
      gradients.push_back(g.output_grad(i));
      begin = end + parts[i].constant();
    }
    end += parts[i].constant();
  }
  fill();
  return gradients;
}

void split_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  const Shape& shape = g.shape(g.input(0));
  const int64_t axis = normalize_axis(g.attrs().int_("axis"), shape.size());
  const Shape parts = parts_of(g, shape[static_cast<size_t>(axis)]);
  std::vector<ValueId> gradients;
  if (is_constant(parts)) {
    gradients = joined_gradients(g, axis, parts);
  } else {
    size_t unwanted = 0;
    for (size_t i = 0; i < parts.size(); ++i) unwanted += g.has_output_grad(i) ? 0 : 1;
    if (unwanted > kMostUnwanted) {
      throw UnsupportedError(str("the gradient of a split of an open extent into ", parts.size(),
                                 " parts, of which ", unwanted, " are not used"));
    }
    g.add_outputs(0, parts.size());
    for (size_t i = 0; i < parts.size(); ++i) gradients.push_back(g.output_grad_or_zeros(i));
  }
  g.set_input_grad(
      0, gradients.size() == 1 ? gradients[0] : g.op("Concat", gradients, {{"axis", axis}}));
}

}  // namespace

void register_concat(OpRegistry& registry);
void register_concat(OpRegistry& registry) {
  registry.add({.name = "Concat",
                .since = 4,
                .summary = "Joins tensors along an axis.",
                .inputs = {{"inputs", "T", Arity::variadic}},
                .outputs = {{"concat_result", "T"}},
                .attrs = {{"axis", AttributeKind::int_, true}},
                .types = {{"T", kAllTypes}},
                .infer = infer_concat,
                .gradient = concat_gradient});
  registry.add({.name = "Split",
                .since = 18,
                .summary = "Cuts a tensor along an axis into parts of given or equal extent.",
                .inputs = {{"input", "T"}, {"split", "int64", Arity::optional}},
                .outputs = {{"outputs", "T", Arity::variadic}},
                .attrs = {{"axis", int64_t{0}}, {"num_outputs", AttributeKind::int_}},
                .types = {{"T", kAllTypes}},
                .infer = infer_split,
                .gradient = split_gradient,
                .row_operand = 0});
}

}  // namespace ortrain::ops
