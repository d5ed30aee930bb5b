// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "ortrain/ir/flops.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ops/conv/conv_problem.h"
#include "ortrain/ops/window/window.h"

namespace ortrain::ops {
namespace {

std::vector<FormalAttribute> conv_attributes() {
  std::vector<FormalAttribute> attrs = window_attributes(false);
  attrs.push_back({"group", int64_t{1}});
  return attrs;
}

bool differ(const Dim& a, const Dim& b) { return a.is_constant() && b.is_constant() && !(a == b); }

// Checks x [N, C, spatial...] against w [M, C/group, kernel...] and returns the shape of
// y [N, M, out...].
Shape conv_output(const AttributeReader& attrs, const Shape& x, const Shape& w) {
  check_spatial_rank(static_cast<int64_t>(x.size()), "the input");
  if (w.size() != x.size()) {
    throw ShapeError(
        str("the weight ", shape_str(w), " must have the rank of the input ", shape_str(x)));
  }
  const int64_t group = attrs.int_("group");
  if (group < 1) throw ShapeError(str("group is ", group, "; it must be positive"));
  if (differ(x[1], w[1] * Dim(group))) {
    throw ShapeError(str("the input has ", x[1].str(), " channels, the weight ", shape_str(w),
                         " with group ", group, " takes ", (w[1] * Dim(group)).str()));
  }
  if (w[0].is_constant() && w[0].constant() % group != 0) {
    throw ShapeError(str("the weight's ", w[0].constant(), " output channels do not divide into ",
                         group, " groups"));
  }
  const Windows windows = read_windows(attrs, x.size() - 2, kernel_extents(w));
  Shape y{x[0], w[0]};
  for (size_t i = 0; i < windows.rank(); ++i) y.push_back(window_count(windows, i, x[i + 2]));
  return y;
}

Shape known_shape(const InferContext& context, size_t index, const char* name) {
  if (!context.known(index)) {
    throw UnsupportedError(str("the contents of ", name, " must be known when the plan is made"));
  }
  return *context.known(index);
}

void check_same_shape(const Shape& actual, const Shape& expected, const char* name) {
  bool wrong = actual.size() != expected.size();
  for (size_t i = 0; !wrong && i < actual.size(); ++i) wrong = differ(actual[i], expected[i]);
  if (wrong) {
    throw ShapeError(
        str(name, " is ", shape_str(actual), "; the convolution gives ", shape_str(expected)));
  }
}

void check_bias(const InferContext& context, const Dim& channels) {
  if (!context.has_input(2)) return;
  const Shape& bias = context.shape(2);
  if (bias.size() != 1 || differ(bias[0], channels)) {
    throw ShapeError(str("the bias is ", shape_str(bias), "; it must be [", channels.str(), "]"));
  }
}

void infer_conv(InferContext& context) {
  Shape y = conv_output(context.attrs(), context.shape(0), context.shape(1));
  check_bias(context, y[1]);
  context.set_output(0, context.dtype(0), std::move(y));
}

void infer_conv_input_grad(InferContext& context) {
  Shape x = known_shape(context, 2, "x_shape");
  check_same_shape(context.shape(0), conv_output(context.attrs(), x, context.shape(1)), "dy");
  context.set_output(0, context.dtype(0), std::move(x));
}

void infer_conv_weight_grad(InferContext& context) {
  Shape w = known_shape(context, 2, "w_shape");
  check_same_shape(context.shape(0), conv_output(context.attrs(), context.shape(1), w), "dy");
  context.set_output(0, context.dtype(0), std::move(w));
}

void infer_conv_transpose(InferContext& context) {
  const AttributeReader attrs = context.attrs();
  const Shape& x = context.shape(0);
  const Shape& w = context.shape(1);
  check_spatial_rank(context.rank(0), "the input");
  if (w.size() != x.size()) {
    throw ShapeError(
        str("the weight ", shape_str(w), " must have the rank of the input ", shape_str(x)));
  }
  const int64_t group = attrs.int_("group");
  if (group < 1) throw ShapeError(str("group is ", group, "; it must be positive"));
  if (differ(x[1], w[0]) || (w[0].is_constant() && w[0].constant() % group != 0)) {
    throw ShapeError(str("the input ", shape_str(x), " does not fit the weight ", shape_str(w),
                         " with group ", group));
  }
  const TransposedWindows transposed = transposed_windows(attrs, x, w);
  Shape y{x[0], w[1] * Dim(group)};
  y.insert(y.end(), transposed.out.begin(), transposed.out.end());
  check_bias(context, y[1]);
  context.set_output(0, context.dtype(0), std::move(y));
}

// The bias gets the sum of dy over everything but the channels.
void bias_gradient(GradContext& g) {
  if (!g.has_input(2) || !g.needs_grad(2)) return;
  const ValueId dy = g.output_grad(0);
  std::vector<int64_t> axes{0};
  for (int64_t axis = 2; axis < g.rank(dy); ++axis) axes.push_back(axis);
  g.set_input_grad(2, g.reduce_sum(dy, axes, false));
}

void conv_gradient(GradContext& g) {
  const ValueId dy = g.output_grad(0), x = g.input(0), w = g.input(1);
  const Attributes attributes = g.node().attributes;
  if (g.needs_grad(0)) {
    g.set_input_grad(0, g.own("ConvInputGrad", {dy, w, g.shape_of(x)}, attributes));
  }
  if (g.needs_grad(1)) {
    g.set_input_grad(1, g.own("ConvWeightGrad", {dy, x, g.shape_of(w)}, attributes));
  }
  bias_gradient(g);
}

// dx is linear in dy and in w.
void conv_input_grad_gradient(GradContext& g) {
  const ValueId ddx = g.output_grad(0), dy = g.input(0), w = g.input(1);
  const Attributes attributes = g.node().attributes;
  if (g.needs_grad(0)) g.set_input_grad(0, g.reshape_like(g.op("Conv", {ddx, w}, attributes), dy));
  if (g.needs_grad(1)) {
    g.set_input_grad(1, g.own("ConvWeightGrad", {dy, ddx, g.shape_of(w)}, attributes));
  }
}

// dw is linear in dy and in x.
void conv_weight_grad_gradient(GradContext& g) {
  const ValueId ddw = g.output_grad(0), dy = g.input(0), x = g.input(1);
  const Attributes attributes = g.node().attributes;
  if (g.needs_grad(0)) g.set_input_grad(0, g.reshape_like(g.op("Conv", {x, ddw}, attributes), dy));
  if (g.needs_grad(1)) {
    g.set_input_grad(1, g.own("ConvInputGrad", {dy, ddw, g.shape_of(x)}, attributes));
  }
}

// y = ConvInputGrad(x, w): dx is the convolution of dy, dw exchanges the roles of x and dy.
void conv_transpose_gradient(GradContext& g) {
  const ValueId dy = g.output_grad(0), x = g.input(0), w = g.input(1);
  const TransposedWindows transposed = transposed_windows(g.attrs(), g.shape(x), g.shape(w));
  if (!transposed.resolved && (g.needs_grad(0) || g.needs_grad(1))) {
    throw UnsupportedError(
        str("the gradient with output_shape needs constant spatial extents; the input is ",
            shape_str(g.shape(x))));
  }
  const Windows& windows = transposed.windows;
  const Attributes attributes{{"kernel_shape", windows.kernel},
                              {"strides", windows.strides},
                              {"dilations", windows.dilations},
                              {"pads", windows.pads},
                              {"group", g.attrs().int_("group")}};
  if (g.needs_grad(0)) g.set_input_grad(0, g.reshape_like(g.op("Conv", {dy, w}, attributes), x));
  if (g.needs_grad(1)) {
    g.set_input_grad(1, g.own("ConvWeightGrad", {x, dy, g.shape_of(w)}, attributes));
  }
  bias_gradient(g);
}

// One filter per element of `points`: the result of a convolution, or the operand of a transposed.
double filter_flops(const TensorSpec& points, const TensorSpec& weight) {
  if (weight.dims.empty() || weight.dims[0] == 0) return 0.0;
  return 2 * count_of(points) * count_of(weight) / static_cast<double>(weight.dims[0]);
}

}  // namespace

void register_conv(OpRegistry& registry) {
  registry.add({.name = "Conv",
                .domain = "",
                .since = 1,
                .summary = "Convolution of [N, C, spatial...] with 1 to 3 spatial axes; negative "
                           "pads crop.",
                .inputs = {{"X", "T"}, {"W", "T"}, {"B", "T", Arity::optional}},
                .outputs = {{"Y", "T"}},
                .attrs = conv_attributes(),
                .types = {{"T", kFloatTypes}},
                .precision = Precision::allow,
                .infer = infer_conv,
                .gradient = conv_gradient,
                .flops = [](const NodeSpec& s) { return filter_flops(s.output(0), s.input(1)); }});
  registry.add({.name = "ConvInputGrad",
                .domain = std::string(kOrtrainDomain),
                .summary = "dx of y = Conv(x, w): the transposed convolution of dy with w.",
                .inputs = {{"dy", "T"}, {"w", "T"}, {"x_shape", "int64"}},
                .outputs = {{"dx", "T"}},
                .attrs = conv_attributes(),
                .types = {{"T", kFloatTypes}},
                .infer = infer_conv_input_grad,
                .gradient = conv_input_grad_gradient,
                .flops = [](const NodeSpec& s) { return filter_flops(s.input(0), s.input(1)); }});
  registry.add({.name = "ConvWeightGrad",
                .domain = std::string(kOrtrainDomain),
                .summary = "dw of y = Conv(x, w): the correlation of x with dy.",
                .inputs = {{"dy", "T"}, {"x", "T"}, {"w_shape", "int64"}},
                .outputs = {{"dw", "T"}},
                .attrs = conv_attributes(),
                .types = {{"T", kFloatTypes}},
                .infer = infer_conv_weight_grad,
                .gradient = conv_weight_grad_gradient,
                .flops = [](const NodeSpec& s) { return filter_flops(s.input(0), s.output(0)); }});
  std::vector<FormalAttribute> transpose_attributes = conv_attributes();
  transpose_attributes.push_back({"output_padding", AttributeKind::ints});
  transpose_attributes.push_back({"output_shape", AttributeKind::ints});
  registry.add({.name = "ConvTranspose",
                .domain = "",
                .since = 11,
                .summary = "Transposed convolution of [N, C, spatial...] with 1 to 3 spatial axes.",
                .inputs = {{"X", "T"}, {"W", "T"}, {"B", "T", Arity::optional}},
                .outputs = {{"Y", "T"}},
                .attrs = std::move(transpose_attributes),
                .types = {{"T", kFloatTypes}},
                .precision = Precision::allow,
                .infer = infer_conv_transpose,
                .gradient = conv_transpose_gradient,
                .flops = [](const NodeSpec& s) { return filter_flops(s.input(0), s.input(1)); }});
}

}  // namespace ortrain::ops
