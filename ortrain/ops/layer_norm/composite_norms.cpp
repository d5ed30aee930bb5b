// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

std::vector<ValueId> expand_lp_normalization(ExpandContext& e) {
  const ValueId x = e.input(0);
  const int64_t p = e.attrs().int_("p");
  if (p != 1 && p != 2) throw InvalidModelError(str("attribute 'p' is ", p, ", expected 1 or 2"));
  const int64_t axis = normalize_axis(e.attrs().int_("axis"), e.shape(x).size());
  const ValueId norm = e.reduce(p == 1 ? "ReduceL1" : "ReduceL2", x, {axis}, true);
  const ValueId zero = e.scalar(e.dtype(x), 0.0), one = e.scalar(e.dtype(x), 1.0);
  const ValueId is_zero = e.op("Equal", {norm, zero});
  return {e.where(is_zero, zero, e.div(x, e.where(is_zero, one, norm)))};
}

// (X - E[X]) / (sqrt(E[X^2] - E[X]^2) + 1e-9)
std::vector<ValueId> expand_mean_variance(ExpandContext& e) {
  const ValueId x = e.input(0);
  const std::vector<int64_t> axes = e.attrs().ints("axes");
  const ValueId centred = e.sub(x, e.reduce("ReduceMean", x, axes, true));
  const ValueId variance = e.reduce("ReduceMean", e.mul(centred, centred), axes, true);
  return {e.div(centred, e.add(e.unary("Sqrt", variance), 1e-9))};
}

// X / (bias + alpha / size * sum of X^2 over `size` channels around)^beta, X [N, C, ...]
std::vector<ValueId> expand_lrn(ExpandContext& e) {
  const ValueId x = e.input(0);
  const int64_t size = e.attrs().int_("size");
  if (size < 1) throw InvalidModelError(str("attribute 'size' is ", size, ", expected 1 or more"));
  if (e.rank(x) < 2) throw ShapeError(str("X is ", shape_str(e.shape(x)), ", without channels"));
  // [N, 1, C, M]: the channels become an axis that windows slide along.
  const ValueId square = e.reshape(
      e.mul(x, x),
      e.concat({e.extent_of(x, 0), e.int64s({1}), e.extent_of(x, 1), e.int64s({-1})}, 0));
  const int64_t before = (size - 1) / 2;
  const ValueId mean = e.op("AveragePool", {square},
                            {{"kernel_shape", std::vector<int64_t>{size, 1}},
                             {"pads", std::vector<int64_t>{before, 0, size - 1 - before, 0}},
                             {"count_include_pad", int64_t{1}}});
  const ValueId scale = e.add(e.mul(e.reshape_like(mean, x), e.attrs().float_("alpha")),
                              e.attrs().float_("bias"));
  const ValueId beta = e.scalar(e.dtype(x), e.attrs().float_("beta"));
  return {e.div(x, e.op("Pow", {scale, beta}))};
}

}  // namespace

void register_composite_norms(OpRegistry& registry);
void register_composite_norms(OpRegistry& registry) {
  const std::map<std::string, DTypeSet> floats{{"T", kFloatTypes}};
  registry.add({.name = "LpNormalization",
                .since = 1,
                .summary = "input over its L1 or L2 norm along an axis; 0 where the norm is 0.",
                .inputs = {{"input", "T"}},
                .outputs = {{"output", "T"}},
                .attrs = {{"axis", int64_t{-1}}, {"p", int64_t{2}}},
                .types = floats,
                .expand = expand_lp_normalization});
  registry.add({.name = "MeanVarianceNormalization",
                .since = 9,
                .summary = "X less its mean, over its standard deviation along axes.",
                .inputs = {{"X", "T"}},
                .outputs = {{"Y", "T"}},
                .attrs = {{"axes", std::vector<int64_t>{0, 2, 3}}},
                .types = floats,
                .expand = expand_mean_variance});
  registry.add({.name = "LRN",
                .since = 1,
                .summary = "X / (bias + alpha / size * sum of X^2 over `size` channels)^beta.",
                .inputs = {{"X", "T"}},
                .outputs = {{"Y", "T"}},
                .attrs = {{"alpha", 1e-4},
                          {"beta", 0.75},
                          {"bias", 1.0},
                          {"size", AttributeKind::int_, true}},
                .types = floats,
                .expand = expand_lrn});
}

}  // namespace ortrain::ops
