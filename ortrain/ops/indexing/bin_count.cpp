// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::ops {
namespace {

void infer_bin_count(InferContext& context) {
  const int64_t bins = context.attrs().int_("bins");
  const double low = context.attrs().float_("min");
  const double high = context.attrs().float_("max");
  if (bins <= 0) throw ShapeError(str("bins must be positive, it is ", bins));
  if (!(low <= high)) throw ShapeError(str("the range [", low, ", ", high, "] is empty"));
  context.set_output(0, context.dtype(0), {Dim(bins)});
}

std::vector<ValueId> bin_count_form(ExpandContext& e) {
  const int64_t bins = e.attrs().int_("bins");
  const double min = e.attrs().float_("min"), max = e.attrs().float_("max");
  const DType type = e.dtype(e.input(0));
  const ValueId x = e.reshape(e.input(0), std::vector<int64_t>{-1});
  const bool of_data = min == 0.0 && max == 0.0;
  ValueId low = of_data ? e.reduce("ReduceMin", x, {0}, false) : e.scalar(type, min);
  ValueId high = of_data ? e.reduce("ReduceMax", x, {0}, false) : e.scalar(type, max);
  // A range of one point is taken wider by 1 on both sides.
  const ValueId point = e.op("Equal", {low, high});
  low = e.where(point, e.sub(low, 1.0), low);
  high = e.where(point, e.add(high, 1.0), high);
  const ValueId inside =
      e.op("And", {e.op("GreaterOrEqual", {x, low}), e.op("LessOrEqual", {x, high})});
  const ValueId share = e.div(e.sub(e.where(inside, x, low), low), e.sub(high, low));
  const ValueId bin = e.unary("Floor", e.mul(share, static_cast<double>(bins)));
  const ValueId last = e.scalar(type, static_cast<double>(bins - 1));
  const ValueId index = e.op("Min", {bin, last});
  const auto number = [&](int64_t n) { return e.constant(TensorData::int_scalar(DType::i64, n)); };
  // When it runs: a file of a few bytes may ask for any number of bins.
  const ValueId numbers = e.op("Range", {number(0), number(bins), number(1)});
  const ValueId columns = e.unsqueeze(e.cast(numbers, type), {0});
  const ValueId hit =
      e.op("And", {e.op("Equal", {e.unsqueeze(index, {1}), columns}), e.unsqueeze(inside, {1})});
  return {e.reduce_sum(e.cast(hit, type), {0}, false)};
}

}  // namespace

void register_bin_count(OpRegistry& registry);
void register_bin_count(OpRegistry& registry) {
  registry.add({.name = "BinCount",
                .domain = std::string(kOrtrainDomain),
                .summary = "How many elements fall into each of `bins` equal intervals of "
                           "[min, max], the last one closed; with min = max = 0 the range is that "
                           "of the data. Elements outside and NaN count nowhere (torch.histc).",
                .inputs = {{"x", "T"}},
                .outputs = {{"counts", "T"}},
                .attrs = {{"bins", int64_t{100}}, {"min", 0.0}, {"max", 0.0}},
                .types = {{"T", kFloatTypes}},
                .infer = infer_bin_count,
                .differentiable = false,
                .standard_form = bin_count_form});
}

}  // namespace ortrain::ops
