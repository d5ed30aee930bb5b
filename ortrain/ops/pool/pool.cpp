// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ops/window/window.h"

namespace ortrain::ops {
namespace {

Shape pooled_shape(const AttributeReader& attrs, const Shape& x) {
  check_spatial_rank(static_cast<int64_t>(x.size()), "the input");
  const Windows windows = read_windows(attrs, x.size() - 2, {});
  Shape y{x[0], x[1]};
  for (size_t i = 0; i < windows.rank(); ++i) {
    const int64_t begin = windows.pads[i], end = windows.pads[i + windows.rank()];
    if (begin < 0 || end < 0 || begin >= windows.span(i) || end >= windows.span(i)) {
      throw ShapeError(str("pads ", begin, " and ", end, " of spatial axis ", i, " must be in [0, ",
                           windows.span(i), "), the extent of the window"));
    }
    y.push_back(window_count(windows, i, x[i + 2]));
  }
  return y;
}

void check_like(const Shape& actual, const Shape& expected, const char* name) {
  bool fits = actual.size() == expected.size();
  for (size_t i = 0; fits && i < actual.size(); ++i) {
    fits = actual[i] == expected[i] || !actual[i].is_constant() || !expected[i].is_constant();
  }
  if (!fits) {
    throw ShapeError(
        str(name, " is ", shape_str(actual), "; the pooling gives ", shape_str(expected)));
  }
}

Shape known_shape(const InferContext& context, size_t index, const char* name) {
  if (!context.known(index)) {
    throw UnsupportedError(str("the contents of ", name, " must be known when the plan is made"));
  }
  return *context.known(index);
}

void infer_max_pool(InferContext& context) {
  const Shape y = pooled_shape(context.attrs(), context.shape(0));
  if (context.wants_output(1) && context.attrs().int_("storage_order") != 0) {
    throw UnsupportedError("Indices with storage_order 1 (column major)");
  }
  context.set_output(0, context.dtype(0), y);
  context.set_output(1, DType::i64, y);
}

void infer_max_pool_grad(InferContext& context) {
  check_like(context.shape(0), pooled_shape(context.attrs(), context.shape(1)), "dy");
  context.set_output(0, context.dtype(1), context.shape(1));
}

void infer_average_pool(InferContext& context) {
  context.set_output(0, context.dtype(0), pooled_shape(context.attrs(), context.shape(0)));
}

void infer_average_pool_grad(InferContext& context) {
  Shape x = known_shape(context, 1, "x_shape");
  check_like(context.shape(0), pooled_shape(context.attrs(), x), "dy");
  context.set_output(0, context.dtype(0), std::move(x));
}

Shape global_shape(const Shape& x) {
  if (x.size() < 3) {
    throw ShapeError(str("the input has rank ", x.size(), "; it needs [N, C, spatial...]"));
  }
  Shape y(x.size(), Dim(1));
  y[0] = x[0];
  y[1] = x[1];
  return y;
}

void infer_global_average_pool(InferContext& context) {
  context.set_output(0, context.dtype(0), global_shape(context.shape(0)));
}

void check_not_empty(const Shape& x) {
  for (size_t i = 2; i < x.size(); ++i) {
    if (x[i].is(0)) throw ShapeError(str("the maximum over no element: ", shape_str(x)));
  }
}

void infer_global_max_pool(InferContext& context) {
  check_not_empty(context.shape(0));
  context.set_output(0, context.dtype(0), global_shape(context.shape(0)));
}

void infer_global_average_pool_grad(InferContext& context) {
  Shape x = known_shape(context, 1, "x_shape");
  check_like(context.shape(0), global_shape(x), "dy");
  context.set_output(0, context.dtype(0), std::move(x));
}

void infer_global_max_pool_grad(InferContext& context) {
  check_not_empty(context.shape(1));
  check_like(context.shape(0), global_shape(context.shape(1)), "dy");
  context.set_output(0, context.dtype(1), context.shape(1));
}

Shape adaptive_shape(const AttributeReader& attrs, const Shape& x) {
  check_spatial_rank(static_cast<int64_t>(x.size()), "the input");
  const std::vector<int64_t>& size = attrs.ints("output_size");
  if (size.size() != x.size() - 2) {
    throw ShapeError(
        str("output_size ", dims_str(size), " does not fit ", x.size() - 2, " spatial axes"));
  }
  Shape y{x[0], x[1]};
  for (size_t i = 0; i < size.size(); ++i) {
    if (size[i] < 1) throw ShapeError(str("output_size ", dims_str(size), " must be positive"));
    if (x[i + 2].is(0)) throw ShapeError(str("the input ", shape_str(x), " has an empty axis"));
    y.push_back(size[i]);
  }
  return y;
}

void infer_adaptive_average_pool(InferContext& context) {
  context.set_output(0, context.dtype(0), adaptive_shape(context.attrs(), context.shape(0)));
}

void infer_adaptive_average_pool_grad(InferContext& context) {
  Shape x = known_shape(context, 1, "x_shape");
  check_like(context.shape(0), adaptive_shape(context.attrs(), x), "dy");
  context.set_output(0, context.dtype(0), std::move(x));
}

// The indices are not kept: x usually is, for the node that made it, and holds them.
void max_pool_gradient(GradContext& g) {
  if (!g.has_output_grad(0)) return;
  Attributes attributes = g.node().attributes;
  attributes.erase("storage_order");
  g.set_input_grad(0, g.own("MaxPoolGrad", {g.output_grad(0), g.input(0)}, attributes));
}

void global_max_pool_gradient(GradContext& g) {
  g.set_input_grad(0, g.own("GlobalMaxPoolGrad", {g.output_grad(0), g.input(0)}));
}

// dx = name(dy, shape of x) with the node's attributes.
std::function<void(GradContext&)> average_gradient(const char* name) {
  return [name](GradContext& g) {
    g.set_input_grad(0,
                     g.own(name, {g.output_grad(0), g.shape_of(g.input(0))}, g.node().attributes));
  };
}

// Averages are linear: the gradient of their gradient in dy is the average itself.
std::function<void(GradContext&)> average_grad_gradient(const char* domain, const char* name) {
  return [domain, name](GradContext& g) {
    if (!g.needs_grad(0)) return;
    const ValueId ddy =
        g.GraphBuilder::node(domain, name, {g.output_grad(0)}, g.node().attributes, {true})[0];
    g.set_input_grad(0, g.reshape_like(ddy, g.input(0)));
  };
}

std::vector<FormalAttribute> pool_attributes() {
  std::vector<FormalAttribute> attrs = window_attributes(true);
  attrs.push_back({"ceil_mode", int64_t{0}});
  return attrs;
}

std::vector<FormalAttribute> with(std::vector<FormalAttribute> attrs, FormalAttribute more) {
  attrs.push_back(std::move(more));
  return attrs;
}

void register_windowed(OpRegistry& registry) {
  const std::string own(kOrtrainDomain);
  const std::vector<FormalAttribute> average =
      with(pool_attributes(), {"count_include_pad", int64_t{0}});
  registry.add({.name = "MaxPool",
                .domain = "",
                .since = 1,
                .summary = "Largest element of each window; Indices count over the whole input. A "
                           "NaN wins.",
                .inputs = {{"X", "T"}},
                .outputs = {{"Y", "T"}, {"Indices", "int64", Arity::optional}},
                .attrs = with(pool_attributes(), {"storage_order", int64_t{0}}),
                .types = {{"T", kFloatTypes}},
                .infer = infer_max_pool,
                .gradient = max_pool_gradient});
  registry.add({.name = "MaxPoolGrad",
                .domain = own,
                .summary = "dx of y = MaxPool(x): each dy goes to the element that MaxPool took.",
                .inputs = {{"dy", "T"}, {"x", "T"}},
                .outputs = {{"dx", "T"}},
                .attrs = pool_attributes(),
                .types = {{"T", kFloatTypes}},
                .infer = infer_max_pool_grad,
                .gradient = nullptr});
  registry.add({.name = "AveragePool",
                .domain = "",
                .since = 1,
                .summary = "Average of each window; padding counts with count_include_pad only.",
                .inputs = {{"X", "T"}},
                .outputs = {{"Y", "T"}},
                .attrs = average,
                .types = {{"T", kFloatTypes}},
                .infer = infer_average_pool,
                .gradient = average_gradient("AveragePoolGrad")});
  registry.add({.name = "AveragePoolGrad",
                .domain = own,
                .summary = "dx of y = AveragePool(x): each dy spread over its window.",
                .inputs = {{"dy", "T"}, {"x_shape", "int64"}},
                .outputs = {{"dx", "T"}},
                .attrs = average,
                .types = {{"T", kFloatTypes}},
                .infer = infer_average_pool_grad,
                .gradient = average_grad_gradient("", "AveragePool")});
}

void register_global(OpRegistry& registry) {
  const std::string own(kOrtrainDomain);
  registry.add({.name = "GlobalAveragePool",
                .domain = "",
                .since = 1,
                .summary = "Average over all spatial axes, kept with extent 1.",
                .inputs = {{"X", "T"}},
                .outputs = {{"Y", "T"}},
                .attrs = {},
                .types = {{"T", kFloatTypes}},
                .infer = infer_global_average_pool,
                .gradient = average_gradient("GlobalAveragePoolGrad")});
  registry.add({.name = "GlobalAveragePoolGrad",
                .domain = own,
                .summary = "dx of y = GlobalAveragePool(x).",
                .inputs = {{"dy", "T"}, {"x_shape", "int64"}},
                .outputs = {{"dx", "T"}},
                .attrs = {},
                .types = {{"T", kFloatTypes}},
                .infer = infer_global_average_pool_grad,
                .gradient = average_grad_gradient("", "GlobalAveragePool")});
  registry.add({.name = "GlobalMaxPool",
                .domain = "",
                .since = 1,
                .summary = "Maximum over all spatial axes, kept with extent 1. A NaN wins.",
                .inputs = {{"X", "T"}},
                .outputs = {{"Y", "T"}},
                .attrs = {},
                .types = {{"T", kFloatTypes}},
                .infer = infer_global_max_pool,
                .gradient = global_max_pool_gradient});
  registry.add({.name = "GlobalMaxPoolGrad",
                .domain = own,
                .summary = "dx of y = GlobalMaxPool(x): dy goes to the first largest element.",
                .inputs = {{"dy", "T"}, {"x", "T"}},
                .outputs = {{"dx", "T"}},
                .attrs = {},
                .types = {{"T", kFloatTypes}},
                .infer = infer_global_max_pool_grad,
                .gradient = nullptr});
}

// One axis after the other: the mean of each result's own elements.
std::vector<ValueId> adaptive_average_pool_form(ExpandContext& e) {
  const std::vector<int64_t>& sizes = e.attrs().ints("output_size");
  ValueId y = e.input(0);
  const int64_t rank = e.rank(y);
  for (int64_t axis = 2; axis < rank; ++axis) {
    const int64_t out = sizes[static_cast<size_t>(axis - 2)];
    if (out == 1) {
      y = e.reduce("ReduceMean", y, {axis}, true);
      continue;
    }
    const int64_t in = e.known_extent(y, static_cast<size_t>(axis), "extent of a pooled axis");
    e.check_listed(out, "pooled elements");
    std::vector<ValueId> parts;
    for (int64_t o = 0; o < out; ++o) {
      const AdaptiveWindow window(o, in, out);
      const ValueId shown = e.slice(y, axis, window.begin, window.end);
      parts.push_back(e.reduce("ReduceMean", shown, {axis}, true));
    }
    y = e.concat(std::move(parts), axis);
  }
  return {y};
}

void register_adaptive(OpRegistry& registry) {
  const std::string own(kOrtrainDomain);
  const std::vector<FormalAttribute> attrs = {{"output_size", AttributeKind::ints, true}};
  registry.add(
      {.name = "AdaptiveAveragePool",
       .domain = own,
       .summary = "Average over [floor(o*in/out), ceil((o+1)*in/out)) of each spatial axis.",
       .inputs = {{"x", "T"}},
       .outputs = {{"y", "T"}},
       .attrs = attrs,
       .types = {{"T", kFloatTypes}},
       .infer = infer_adaptive_average_pool,
       .gradient = average_gradient("AdaptiveAveragePoolGrad"),
       .standard_form = adaptive_average_pool_form});
  registry.add({.name = "AdaptiveAveragePoolGrad",
                .domain = own,
                .summary = "dx of y = AdaptiveAveragePool(x).",
                .inputs = {{"dy", "T"}, {"x_shape", "int64"}},
                .outputs = {{"dx", "T"}},
                .attrs = attrs,
                .types = {{"T", kFloatTypes}},
                .infer = infer_adaptive_average_pool_grad,
                .gradient = average_grad_gradient("ortrain", "AdaptiveAveragePool")});
}

}  // namespace

void register_pool(OpRegistry& registry) {
  register_windowed(registry);
  register_global(registry);
  register_adaptive(registry);
}

}  // namespace ortrain::ops
