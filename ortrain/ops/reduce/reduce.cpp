// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/expr_program.h"
#include "ortrain/ir/grad_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

constexpr DTypeSet kReduceTypes =
    kFloatTypes | DTypeSet{DType::i32, DType::i64, DType::u32, DType::u64};
constexpr DTypeSet kExtremeTypes = kReduceTypes | DTypeSet{DType::i8, DType::u8, DType::boolean};

// Known axes of a node, given what is known of its input 1.
std::vector<int64_t> reduced_axes(const AttributeReader& attrs,
                                  const std::optional<std::vector<int64_t>>& axes, size_t rank) {
  const bool none = !axes || axes->empty();
  if (none && attrs.int_("noop_with_empty_axes") != 0) return {};
  return normalize_axes_or_all(axes, rank);
}

// Throws ShapeError beyond 64 bits.
Dim fold_known(const std::string& op, const std::vector<Dim>& contents) {
  Dim result = contents[0];
  for (size_t i = 1; i < contents.size(); ++i) {
    const Dim& next = contents[i];
    if (op == "ReduceSum") {
      result = checked_add(result, next);
    } else if (op == "ReduceProd") {
      result = checked_mul(result, next);
    } else if (op == "ReduceMax") {
      result = max(result, next);
    } else {
      result = min(result, next);
    }
  }
  return result;
}

// Gives the result its type and shape; returns which axes go.
std::vector<bool> infer_reduced(InferContext& context, DType type) {
  const Shape& from = context.shape(0);
  std::optional<std::vector<int64_t>> axes;
  if (context.has_input(1)) axes = required_ints(context, 1, "axes");
  std::vector<bool> reduced(from.size(), false);
  for (int64_t axis : reduced_axes(context.attrs(), axes, from.size())) {
    reduced[static_cast<size_t>(axis)] = true;
  }
  const bool keepdims = context.attrs().int_("keepdims") != 0;
  Shape shape;
  for (size_t i = 0; i < from.size(); ++i) {
    if (!reduced[i]) {
      shape.push_back(from[i]);
    } else if (keepdims) {
      shape.push_back(Dim(1));
    }
  }
  context.set_output(0, type, std::move(shape));
  return reduced;
}

void infer_reduce(InferContext& context) {
  const std::vector<bool> reduced = infer_reduced(context, context.dtype(0));
  const std::string& op = context.node().op;
  const bool folds =
      op == "ReduceSum" || op == "ReduceProd" || op == "ReduceMax" || op == "ReduceMin";
  if (folds && context.known(0) && !context.known(0)->empty() && reduced == std::vector{true}) {
    try {
      context.set_known(0, {fold_known(op, *context.known(0))});
    } catch (const ShapeError&) {
      // Unknown: kernels wrap.
    }
  }
}

void infer_wide_sum(InferContext& context) {
  infer_reduced(context, expr_register_type(context.dtype(0)));
}

// What every gradient needs: axes, and values of the result's shape with the axes kept.
class ReduceGradient {
 public:
  explicit ReduceGradient(GradContext& g) : g_(g) {
    std::optional<std::vector<int64_t>> axes;
    if (g.has_input(1)) {
      axes = value_ints(g.graph(), g.input(1));
      check(axes.has_value(), "inference has read the axes");
    }
    axes_ = reduced_axes(g.attrs(), axes, g.shape(g.input(0)).size());
    keepdims_ = g.attrs().int_("keepdims") != 0;
  }

  const std::vector<int64_t>& axes() const { return axes_; }
  ValueId x() const { return g_.input(0); }
  ValueId kept(ValueId value) const {
    return keepdims_ || axes_.empty() ? value : g_.unsqueeze(value, axes_);
  }
  ValueId dy() const { return kept(g_.output_grad(0)); }
  ValueId y() const { return kept(g_.output(0)); }
  // Counts of elements outgrow the 16-bit types: they are held, and divided by, in this type.
  DType count_type() const { return size_of(g_.dtype(x())) == 2 ? DType::f32 : g_.dtype(x()); }
  // The number of elements per result.
  ValueId count() const {
    int64_t count = 1;
    for (int64_t axis : axes_) {
      const Dim& extent = g_.shape(x())[static_cast<size_t>(axis)];
      if (!extent.is_constant()) {
        const ValueId extents = extents_at(g_, x(), axes_);
        const ValueId product = g_.op("ReduceProd", {extents}, {{"keepdims", int64_t{0}}});
        return g_.cast(product, count_type());
      }
      count *= extent.constant();
    }
    return g_.scalar(count_type(), static_cast<double>(count));
  }
  ValueId divided_by_count(ValueId value, ValueId count) const {
    return g_.cast(g_.div(g_.cast(value, count_type()), count), g_.dtype(x()));
  }
  void set(ValueId dx) const { g_.set_input_grad(0, g_.expand_like(dx, x())); }

 private:
  GradContext& g_;
  std::vector<int64_t> axes_;
  bool keepdims_ = true;
};

void sum_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  const ReduceGradient r(g);
  r.set(r.dy());
}

void wide_sum_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  const ReduceGradient r(g);
  r.set(g.cast(r.dy(), g.dtype(r.x())));
}

void mean_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  const ReduceGradient r(g);
  r.set(r.divided_by_count(r.dy(), r.count()));
}

// Elements that share the extreme value share its gradient evenly.
void extreme_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  const ReduceGradient r(g);
  const ValueId is_hit = g.op("Equal", {r.x(), r.y()});
  const ValueId hits = g.cast(is_hit, g.dtype(r.x()));
  if (r.axes().empty()) return r.set(g.mul(r.dy(), hits));
  const ValueId count = g.reduce_sum(g.cast(is_hit, r.count_type()), r.axes(), true);
  r.set(g.mul(hits, r.divided_by_count(r.dy(), count)));
}

void product_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  const ReduceGradient r(g);
  g.set_input_grad(0, g.own("ReduceProdGrad", {r.dy(), r.x()}, {{"axes", r.axes()}}));
}

void l1_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  const ReduceGradient r(g);
  r.set(g.mul(r.dy(), g.sign_or_zero(r.x())));
}

// x / y; where the norm is zero, so is the gradient.
void l2_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  const ReduceGradient r(g);
  const ValueId y = r.y();
  const ValueId zero = g.scalar(g.dtype(y), 0.0);
  const ValueId scale = g.where(g.op("Equal", {y, zero}), zero, g.div(r.dy(), y));
  r.set(g.mul(r.x(), scale));
}

void sum_square_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  const ReduceGradient r(g);
  r.set(g.mul(r.x(), g.mul(r.dy(), 2.0)));
}

void log_sum_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  const ReduceGradient r(g);
  // The sum itself may be out of range for 16-bit types.
  r.set(g.mul(r.dy(), g.unary("Exp", g.neg(r.y()))));
}

void log_sum_exp_gradient(GradContext& g) {
  if (!g.needs_grad(0)) return;
  const ReduceGradient r(g);
  r.set(g.mul(g.unary("Exp", g.sub(r.x(), r.y())), r.dy()));
}

void infer_prod_grad(InferContext& context) {
  const Shape& shape = context.shape(1);
  const std::vector<int64_t> axes = normalize_axes(context.attrs().ints("axes"), shape.size());
  Shape expected = shape;
  for (int64_t axis : axes) expected[static_cast<size_t>(axis)] = 1;
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

}  // namespace

void register_reduce(OpRegistry& registry);
void register_reduce(OpRegistry& registry) {
  const auto add = [&registry](const char* name, int since, const char* summary, DTypeSet types,
                               void (*gradient)(GradContext&),
                               Precision precision = Precision::deny) {
    registry.add({.name = name,
                  .since = since,
                  .summary = summary,
                  .inputs = {{"data", "T"}, {"axes", "int64", Arity::optional}},
                  .outputs = {{"reduced", "T"}},
                  .attrs = {{"keepdims", int64_t{1}}, {"noop_with_empty_axes", int64_t{0}}},
                  .types = {{"T", types}},
                  .precision = precision,
                  .infer = infer_reduce,
                  .gradient = gradient});
  };
  add("ReduceSum", 13, "Sum over axes.", kReduceTypes, sum_gradient);
  add("ReduceMean", 18, "Mean over axes.", kReduceTypes, mean_gradient);
  add("ReduceMax", 18, "Maximum over axes; the gradient is split evenly among ties.", kExtremeTypes,
      extreme_gradient, Precision::promote);
  add("ReduceMin", 18, "Minimum over axes; the gradient is split evenly among ties.", kExtremeTypes,
      extreme_gradient, Precision::promote);
  add("ReduceProd", 18, "Product over axes.", kReduceTypes, product_gradient);
  add("ReduceL1", 18, "Sum of absolute values over axes.", kReduceTypes, l1_gradient);
  add("ReduceL2", 18, "Square root of the sum of squares over axes.", kReduceTypes, l2_gradient);
  add("ReduceSumSquare", 18, "Sum of squares over axes.", kReduceTypes, sum_square_gradient);
  add("ReduceLogSum", 18, "Logarithm of the sum over axes.", kReduceTypes, log_sum_gradient);
  add("ReduceLogSumExp", 18, "log(sum(exp(x))) over axes, without overflow.", kFloatTypes,
      log_sum_exp_gradient);
  registry.add({.name = "WideReduceSum",
                .domain = std::string(kOrtrainDomain),
                .summary = "ReduceSum as summed: in float32 for the 16-bit types, not rounded.",
                .inputs = {{"data", "T"}, {"axes", "int64", Arity::optional}},
                .outputs = {{"reduced", "T2"}},
                .attrs = {{"keepdims", int64_t{1}}, {"noop_with_empty_axes", int64_t{0}}},
                .types = {{"T", kFloatTypes}, {"T2", kFloatTypes}},
                .infer = infer_wide_sum,
                .gradient = wide_sum_gradient});
  registry.add({.name = "ReduceProdGrad",
                .domain = std::string(kOrtrainDomain),
                .summary = "Gradient of ReduceProd: dx_i = dy * prod_{j != i} x_j over the axes; "
                           "dy has extent 1 there.",
                .inputs = {{"dy", "T"}, {"x", "T"}},
                .outputs = {{"dx", "T"}},
                .attrs = {{"axes", AttributeKind::ints, true}},
                .types = {{"T", kFloatTypes}},
                .infer = infer_prod_grad});
}

}  // namespace ortrain::ops
