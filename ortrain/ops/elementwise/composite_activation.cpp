// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::ops {
namespace {

ValueId zero_of(ExpandContext& e, ValueId x) { return e.scalar(e.dtype(x), 0.0); }

std::vector<ValueId> expand_cast_like(ExpandContext& e) {
  return {e.cast(e.input(0), e.dtype(e.input(1)))};
}

std::vector<ValueId> expand_prelu(ExpandContext& e) {
  const ValueId x = e.input(0);
  return {e.where(e.op("Less", {x, zero_of(e, x)}), e.mul(x, e.input(1)), x)};
}

std::vector<ValueId> expand_thresholded_relu(ExpandContext& e) {
  const ValueId x = e.input(0);
  const ValueId alpha = e.scalar(e.dtype(x), e.attrs().float_("alpha"));
  return {e.where(e.op("Greater", {x, alpha}), x, zero_of(e, x))};
}

// x + bias below -lambd, x - bias above lambd, 0 between
std::vector<ValueId> expand_shrink(ExpandContext& e) {
  const ValueId x = e.input(0);
  const double lambd = e.attrs().float_("lambd"), bias = e.attrs().float_("bias");
  // Bounds that are no integers do not fit the type of an integer x.
  const ValueId compared = is_float(e.dtype(x)) ? x : e.cast(x, DType::f64);
  const DType type = e.dtype(compared);
  const ValueId above = e.op("Greater", {compared, e.scalar(type, lambd)});
  const ValueId below = e.op("Less", {compared, e.scalar(type, -lambd)});
  const ValueId middle = e.where(above, e.sub(compared, bias), zero_of(e, compared));
  return {e.cast(e.where(below, e.add(compared, bias), middle), e.dtype(x))};
}

ValueId swish(ExpandContext& e, ValueId x) {
  const double alpha = e.attrs().float_("alpha");
  return e.mul(x, e.unary("Sigmoid", alpha == 1.0 ? x : e.mul(x, alpha)));
}

std::vector<ValueId> expand_swish(ExpandContext& e) { return {swish(e, e.input(0))}; }

std::vector<ValueId> expand_swiglu(ExpandContext& e) {
  return {e.mul(swish(e, e.input(0)), e.input(1))};
}

}  // namespace

void register_composite_activation(OpRegistry& registry);
void register_composite_activation(OpRegistry& registry) {
  const std::map<std::string, DTypeSet> floats{{"T", kFloatTypes}};
  registry.add({.name = "CastLike",
                .since = 15,
                .summary = "The first input in the element type of the second.",
                .inputs = {{"input", "T1"}, {"target_type", "T2"}},
                .outputs = {{"output", "T2"}},
                .attrs = {{"saturate", int64_t{1}}, {"round_mode", std::string("up")}},
                .types = {{"T1", kAllTypes}, {"T2", kAllTypes}},
                .expand = expand_cast_like});
  registry.add({.name = "PRelu",
                .since = 9,
                .summary = "X, times slope where X is negative.",
                .inputs = {{"X", "T"}, {"slope", "T"}},
                .outputs = {{"Y", "T"}},
                .types = {{"T", kNumericTypes}},
                .expand = expand_prelu});
  registry.add({.name = "ThresholdedRelu",
                .since = 10,
                .summary = "X where it is above alpha, else 0.",
                .inputs = {{"X", "T"}},
                .outputs = {{"Y", "T"}},
                .attrs = {{"alpha", 1.0}},
                .types = floats,
                .expand = expand_thresholded_relu});
  registry.add({.name = "Shrink",
                .since = 9,
                .summary = "input + bias below -lambd, input - bias above lambd, else 0.",
                .inputs = {{"input", "T"}},
                .outputs = {{"output", "T"}},
                .attrs = {{"bias", 0.0}, {"lambd", 0.5}},
                .types = {{"T", kNumericTypes}},
                .expand = expand_shrink});
  registry.add({.name = "Swish",
                .since = 24,
                .summary = "X sigmoid(alpha X).",
                .inputs = {{"X", "T"}},
                .outputs = {{"Y", "T"}},
                .attrs = {{"alpha", 1.0}},
                .types = floats,
                .expand = expand_swish});
  registry.add({.name = "SwiGLU",
                .since = 28,
                .summary = "Swish(A) B.",
                .inputs = {{"A", "T"}, {"B", "T"}},
                .outputs = {{"Y", "T"}},
                .attrs = {{"alpha", 1.0}},
                .types = floats,
                .expand = expand_swiglu});
}

}  // namespace ortrain::ops
