// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>

#include "ortrain/base/error.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

void check_elements_indices(const Shape& data, const Shape& indices, int64_t axis) {
  bool fits = data.size() == indices.size();
  for (size_t i = 0; fits && i < data.size(); ++i) {
    if (static_cast<int64_t>(i) == axis) continue;
    fits = !data[i].is_constant() || !indices[i].is_constant() ||
           indices[i].constant() <= data[i].constant();
  }
  if (!fits) {
    throw ShapeError(str("indices of shape ", shape_str(indices), " do not fit data of shape ",
                         shape_str(data), " beside axis ", axis));
  }
}

void check_same(const Shape& given, const Shape& expected, const char* what) {
  bool same = given.size() == expected.size();
  for (size_t i = 0; same && i < given.size(); ++i) {
    same = !given[i].is_constant() || !expected[i].is_constant() || given[i] == expected[i];
  }
  if (!same) {
    throw ShapeError(
        str(what, " has the shape ", shape_str(given), ", expected ", shape_str(expected)));
  }
}

void check_reduction(const InferContext& context) {
  const std::string& reduction = context.attrs().string_("reduction");
  if (reduction != "none" && reduction != "add" && reduction != "mul" && reduction != "max" &&
      reduction != "min") {
    throw InvalidModelError(str("reduction '", reduction, "' is none of none, add, mul, max, min"));
  }
}

void infer_gather_elements(InferContext& context) {
  const int64_t axis = normalize_axis(context.attrs().int_("axis"), context.shape(0).size());
  check_elements_indices(context.shape(0), context.shape(1), axis);
  context.set_output(0, context.dtype(0), context.shape(1));
}

void infer_scatter_elements(InferContext& context) {
  check_reduction(context);
  const int64_t axis = normalize_axis(context.attrs().int_("axis"), context.shape(0).size());
  check_elements_indices(context.shape(0), context.shape(1), axis);
  check_same(context.shape(2), context.shape(1), "input 'updates'");
  context.set_output(0, context.dtype(0), context.shape(0));
}

// The shape of the slices that GatherND reads, one after the other, with the batch in front.
Shape gathered_nd(const Shape& data, const Shape& indices, int64_t batch_dims) {
  if (data.empty() || indices.empty()) throw ShapeError("data and indices need one axis at least");
  const int64_t smaller = static_cast<int64_t>(std::min(data.size(), indices.size()));
  if (batch_dims < 0 || batch_dims >= smaller) {
    throw ShapeError(str("batch_dims ", batch_dims, " is out of range for data of shape ",
                         shape_str(data), " and indices of shape ", shape_str(indices)));
  }
  if (!indices.back().is_constant()) {
    throw UnsupportedError(
        str("the length of an index must be known, indices have the shape ", shape_str(indices)));
  }
  const int64_t length = indices.back().constant();
  if (length < 0 || batch_dims + length > static_cast<int64_t>(data.size())) {
    throw ShapeError(str("indices of length ", length, " do not fit data of shape ",
                         shape_str(data), " with batch_dims ", batch_dims));
  }
  for (int64_t i = 0; i < batch_dims; ++i) {
    same_extent(data[static_cast<size_t>(i)], indices[static_cast<size_t>(i)]);
  }
  Shape shape(indices.begin(), indices.end() - 1);
  shape.insert(shape.end(), data.begin() + batch_dims + length, data.end());
  checked_product(shape);
  return shape;
}

void infer_gather_nd(InferContext& context) {
  context.set_output(
      0, context.dtype(0),
      gathered_nd(context.shape(0), context.shape(1), context.attrs().int_("batch_dims")));
}

void infer_gather_nd_grad(InferContext& context) {
  const Shape shape = required_known(context, 2, "shape");
  check_same(context.shape(0),
             gathered_nd(shape, context.shape(1), context.attrs().int_("batch_dims")),
             "the gradient");
  context.set_output(0, context.dtype(0), shape);
}

void infer_scatter_nd(InferContext& context) {
  check_reduction(context);
  check_same(context.shape(2), gathered_nd(context.shape(0), context.shape(1), 0),
             "input 'updates'");
  context.set_output(0, context.dtype(0), context.shape(0));
}

void gather_elements_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  g.set_input_grad(0,
                   g.op("ScatterElements", {g.zeros_like(g.input(0)), g.input(1), g.output_grad(0)},
                        {{"axis", g.attrs().int_("axis")}, {"reduction", std::string("add")}}));
}

void gather_nd_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  g.set_input_grad(0, g.own("GatherNDGrad", {g.output_grad(0), g.input(1), g.shape_of(g.input(0))},
                            {{"batch_dims", g.attrs().int_("batch_dims")}}));
}

void gather_nd_grad_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  g.set_input_grad(0, g.op("GatherND", {g.output_grad(0), g.input(1)},
                           {{"batch_dims", g.attrs().int_("batch_dims")}}));
}

// The gradients of a scatter in terms of reading (gather) and writing (scatter) at its indices.
class ScatterGradient {
 public:
  using Gather = std::function<ValueId(ValueId)>;
  using Scatter = std::function<ValueId(ValueId data, ValueId updates, const char* reduction)>;

  ScatterGradient(GradContext& g, Gather gather, Scatter scatter)
      : g_(g),
        gather_(std::move(gather)),
        scatter_(std::move(scatter)),
        data_(g.input(0)),
        updates_(g.input(2)),
        dy_(g.output_grad(0)) {}

  void build() {
    const std::string& reduction = g_.attrs().string_("reduction");
    if (reduction == "none") {
      set(0, [&] { return scatter_(dy_, g_.zeros_like(updates_), "none"); });
      set(2, [&] { return gather_(dy_); });
    } else if (reduction == "add") {
      set(0, [&] { return dy_; });
      set(2, [&] { return gather_(dy_); });
    } else if (reduction == "mul") {
      set(0, [&] { return g_.mul(dy_, scatter_(g_.ones_like(data_), updates_, "mul")); });
      set(2, [&] { return product_of_others(); });
    } else {
      build_extreme();
    }
  }

 private:
  void set(size_t index, const std::function<ValueId()>& build) {
    if (g_.needs_grad(index)) g_.set_input_grad(index, build());
  }

  // dy * y / update; for an update that is the only zero of its place, dy times all the others.
  ValueId product_of_others() {
    const DType dtype = g_.dtype(updates_);
    const ValueId zero = g_.scalar(dtype, 0.0);
    const ValueId one = g_.scalar(dtype, 1.0);
    const ValueId is_zero = g_.op("Equal", {updates_, zero});
    const ValueId without_zeros = g_.where(is_zero, one, updates_);
    const ValueId zeros = gather_(scatter_(g_.zeros_like(data_), g_.cast(is_zero, dtype), "add"));
    const ValueId others = gather_(g_.mul(dy_, scatter_(data_, without_zeros, "mul")));
    const ValueId only_zero = g_.where(g_.op("Equal", {zeros, one}), others, zero);
    const ValueId quotient = g_.div(gather_(g_.mul(dy_, g_.output(0))), without_zeros);
    return g_.where(is_zero, only_zero, quotient);
  }

  // All that share the extreme value of a place share its gradient evenly.
  void build_extreme() {
    // Ties are counted, and divided by, in a type that can count them.
    const DType dtype = g_.dtype(data_);
    const DType wide = size_of(dtype) == 2 ? DType::f32 : dtype;
    const ValueId y = g_.output(0);
    const ValueId data_hits = g_.cast(g_.op("Equal", {data_, y}), wide);
    const ValueId update_hits = g_.cast(g_.op("Equal", {updates_, gather_(y)}), wide);
    const ValueId share = g_.div(g_.cast(dy_, wide), scatter_(data_hits, update_hits, "add"));
    set(0, [&] { return g_.cast(g_.mul(share, data_hits), dtype); });
    set(2, [&] { return g_.cast(g_.mul(gather_(share), update_hits), dtype); });
  }

  GradContext& g_;
  Gather gather_;
  Scatter scatter_;
  ValueId data_, updates_, dy_;
};

void scatter_elements_gradient(GradContext& g) {
  const int64_t axis = g.attrs().int_("axis");
  ScatterGradient(
      g, [&](ValueId x) { return g.op("GatherElements", {x, g.input(1)}, {{"axis", axis}}); },
      [&](ValueId data, ValueId updates, const char* reduction) {
        return g.op("ScatterElements", {data, g.input(1), updates},
                    {{"axis", axis}, {"reduction", std::string(reduction)}});
      })
      .build();
}

void scatter_nd_gradient(GradContext& g) {
  ScatterGradient(
      g, [&](ValueId x) { return g.op("GatherND", {x, g.input(1)}); },
      [&](ValueId data, ValueId updates, const char* reduction) {
        return g.op("ScatterND", {data, g.input(1), updates},
                    {{"reduction", std::string(reduction)}});
      })
      .build();
}

}  // namespace

void register_scatter(OpRegistry& registry);
void register_scatter(OpRegistry& registry) {
  registry.add({.name = "GatherElements",
                .since = 11,
                .summary = "Elements picked by an index along one axis, at equal positions else.",
                .inputs = {{"data", "T"}, {"indices", "Tind"}},
                .outputs = {{"output", "T"}},
                .attrs = {{"axis", int64_t{0}}},
                .types = {{"T", kAllTypes}, {"Tind", kIndexTypes}},
                .infer = infer_gather_elements,
                .gradient = gather_elements_gradient,
                .looks_up = true});
  registry.add({.name = "ScatterElements",
                .since = 11,
                .summary = "A copy of data with updates put, added, multiplied, or taken as "
                           "maximum or minimum, where indices along one axis point.",
                .inputs = {{"data", "T"}, {"indices", "Tind"}, {"updates", "T"}},
                .outputs = {{"output", "T"}},
                .attrs = {{"axis", int64_t{0}}, {"reduction", std::string("none")}},
                .types = {{"T", kAllTypes}, {"Tind", kIndexTypes}},
                .infer = infer_scatter_elements,
                .gradient = scatter_elements_gradient});
  registry.add({.name = "GatherND",
                .since = 11,
                .summary = "Slices picked by index tuples.",
                .inputs = {{"data", "T"}, {"indices", "int64"}},
                .outputs = {{"output", "T"}},
                .attrs = {{"batch_dims", int64_t{0}}},
                .types = {{"T", kAllTypes}},
                .infer = infer_gather_nd,
                .gradient = gather_nd_gradient,
                .looks_up = true});
  registry.add({.name = "GatherNDGrad",
                .domain = std::string(kOrtrainDomain),
                .summary = "Gradient of GatherND: zeros of `shape`, to which every slice of dy is "
                           "added where its index tuple points.",
                .inputs = {{"dy", "T"}, {"indices", "int64"}, {"shape", "int64"}},
                .outputs = {{"dx", "T"}},
                .attrs = {{"batch_dims", int64_t{0}}},
                .types = {{"T", kFloatTypes}},
                .infer = infer_gather_nd_grad,
                .gradient = gather_nd_grad_gradient});
  registry.add({.name = "ScatterND",
                .since = 11,
                .summary = "A copy of data with slices put, added, multiplied, or taken as "
                           "maximum or minimum, where index tuples point.",
                .inputs = {{"data", "T"}, {"indices", "int64"}, {"updates", "T"}},
                .outputs = {{"output", "T"}},
                .attrs = {{"reduction", std::string("none")}},
                .types = {{"T", kAllTypes}},
                .infer = infer_scatter_nd,
                .gradient = scatter_nd_gradient});
}

}  // namespace ortrain::ops
