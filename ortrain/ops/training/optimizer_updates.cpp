// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::ops {
namespace {

constexpr const char* kDomain = "ai.onnx.preview.training";

// Rate R and count T stand first, then the tensors: n of the first kind, n of the second, ...
struct Tensors {
  ExpandContext& e;
  size_t kinds;

  size_t count() const {
    const size_t tensors = e.num_inputs() - 2;
    if (tensors == 0 || tensors % kinds != 0) {
      throw InvalidModelError(str("takes ", kinds, " tensors per optimized one, has ", tensors));
    }
    return tensors / kinds;
  }
  ValueId get(size_t kind, size_t i) const { return e.input(2 + kind * count() + i); }
  // A scalar of the type that tensor i is in.
  ValueId rate(ValueId scalar, size_t i) const { return e.cast(scalar, e.dtype(get(0, i))); }
};

// Of each optimized tensor its outputs, put into the order of the operator.
std::vector<ValueId> in_order(const std::vector<std::vector<ValueId>>& made) {
  std::vector<ValueId> result;
  for (size_t kind = 0; kind < made[0].size(); ++kind) {
    for (const std::vector<ValueId>& outputs : made) result.push_back(outputs[kind]);
  }
  return result;
}

// G + norm_coefficient X
ValueId regularized(ExpandContext& e, ValueId x, ValueId gradient) {
  const double coefficient = e.attrs().float_("norm_coefficient");
  return coefficient == 0.0 ? gradient : e.add(gradient, e.mul(x, coefficient));
}

ValueId as_double(ExpandContext& e, size_t input) { return e.cast(e.input(input), DType::f64); }

std::vector<ValueId> expand_adagrad(ExpandContext& e) {
  const Tensors tensors{e, 3};
  const ValueId decay = e.add(e.mul(as_double(e, 1), e.attrs().float_("decay_factor")), 1.0);
  const ValueId rate = e.div(as_double(e, 0), decay);
  std::vector<std::vector<ValueId>> made;
  for (size_t i = 0; i < tensors.count(); ++i) {
    const ValueId x = tensors.get(0, i);
    const ValueId g = regularized(e, x, tensors.get(1, i));
    const ValueId h = e.add(tensors.get(2, i), e.mul(g, g));
    const ValueId scale = e.add(e.unary("Sqrt", h), e.attrs().float_("epsilon"));
    made.push_back({e.sub(x, e.div(e.mul(tensors.rate(rate, i), g), scale)), h});
  }
  return in_order(made);
}

std::vector<ValueId> expand_adam(ExpandContext& e) {
  const Tensors tensors{e, 4};
  const double alpha = e.attrs().float_("alpha"), beta = e.attrs().float_("beta");
  const ValueId r = as_double(e, 0), t = as_double(e, 1);
  const auto bias = [&](double decay) {
    const ValueId power = e.op("Pow", {e.scalar(DType::f64, decay), t});
    return e.sub(e.scalar(DType::f64, 1.0), power);
  };
  const ValueId corrected = e.div(e.mul(r, e.unary("Sqrt", bias(beta))), bias(alpha));
  const ValueId started = e.op("Greater", {t, e.scalar(DType::f64, 0.0)});
  const ValueId rate = e.where(started, corrected, r);
  std::vector<std::vector<ValueId>> made;
  for (size_t i = 0; i < tensors.count(); ++i) {
    const ValueId x = tensors.get(0, i);
    const ValueId g = regularized(e, x, tensors.get(1, i));
    const ValueId v = e.add(e.mul(tensors.get(2, i), alpha), e.mul(g, 1.0 - alpha));
    const ValueId h = e.add(e.mul(tensors.get(3, i), beta), e.mul(e.mul(g, g), 1.0 - beta));
    const ValueId scale = e.add(e.unary("Sqrt", h), e.attrs().float_("epsilon"));
    const ValueId moved = e.sub(x, e.div(e.mul(tensors.rate(rate, i), v), scale));
    made.push_back({e.mul(moved, 1.0 - e.attrs().float_("norm_coefficient_post")), v, h});
  }
  return in_order(made);
}

std::vector<ValueId> expand_momentum(ExpandContext& e) {
  const std::string& mode = e.attrs().string_("mode");
  if (mode != "standard" && mode != "nesterov") {
    throw InvalidModelError(str("mode '", mode, "' is neither 'standard' nor 'nesterov'"));
  }
  const Tensors tensors{e, 3};
  const double alpha = e.attrs().float_("alpha");
  const ValueId one = e.scalar(DType::f64, 1.0);
  const ValueId started = e.op("Greater", {as_double(e, 1), e.scalar(DType::f64, 0.0)});
  const ValueId beta = e.where(started, e.scalar(DType::f64, e.attrs().float_("beta")), one);
  std::vector<std::vector<ValueId>> made;
  for (size_t i = 0; i < tensors.count(); ++i) {
    const ValueId x = tensors.get(0, i);
    const ValueId g = regularized(e, x, tensors.get(1, i));
    const ValueId v = e.add(e.mul(tensors.get(2, i), alpha), e.mul(tensors.rate(beta, i), g));
    const ValueId direction = mode == "standard" ? v : e.add(g, e.mul(v, alpha));
    made.push_back({e.sub(x, e.mul(tensors.rate(e.input(0), i), direction)), v});
  }
  return in_order(made);
}

}  // namespace

void register_optimizer_updates(OpRegistry& registry);
void register_optimizer_updates(OpRegistry& registry) {
  const std::vector<FormalValue> inputs{
      {"R", "T1"}, {"T", "int64"}, {"inputs", "T3*", Arity::variadic}};
  const std::vector<FormalValue> outputs{{"outputs", "T3*", Arity::variadic}};
  const DTypeSet wide{DType::f32, DType::f64};
  const std::map<std::string, DTypeSet> types{{"T1", wide}, {"T3*", wide}};
  registry.add({.name = "Adagrad",
                .domain = kDomain,
                .summary = "One step of Adagrad on any number of tensors.",
                .inputs = inputs,
                .outputs = outputs,
                .attrs = {{"norm_coefficient", 0.0}, {"decay_factor", 0.0}, {"epsilon", 1e-6}},
                .types = types,
                .expand = expand_adagrad});
  registry.add({.name = "Adam",
                .domain = kDomain,
                .summary = "One step of Adam on any number of tensors.",
                .inputs = inputs,
                .outputs = outputs,
                .attrs = {{"alpha", 0.9},
                          {"beta", 0.999},
                          {"epsilon", 1e-6},
                          {"norm_coefficient", 0.0},
                          {"norm_coefficient_post", 0.0}},
                .types = types,
                .expand = expand_adam});
  registry.add({.name = "Momentum",
                .domain = kDomain,
                .summary = "One step of gradient descent with momentum on any number of tensors.",
                .inputs = inputs,
                .outputs = outputs,
                .attrs = {{"alpha", AttributeKind::float_, true},
                          {"beta", AttributeKind::float_, true},
                          {"mode", AttributeKind::string_, true},
                          {"norm_coefficient", AttributeKind::float_, true}},
                .types = types,
                .expand = expand_momentum});
}

}  // namespace ortrain::ops
