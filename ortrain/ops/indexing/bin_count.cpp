// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
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
                .differentiable = false});
}

}  // namespace ortrain::ops
