// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ortrain/base/error.h"
#include "ortrain/ir/infer_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

constexpr int64_t kMaxKnownRange = 64;

// ceil((limit - start) / delta), at least 0; in 128 bits, since the difference may not fit.
int64_t range_length(int64_t start, int64_t limit, int64_t delta) {
  const __int128 span = static_cast<__int128>(limit) - start;
  const __int128 step = delta;
  if (span == 0 || (span > 0) != (step > 0)) return 0;
  const __int128 count = (span + step + (step > 0 ? -1 : 1)) / step;
  if (count > INT64_MAX) throw ShapeError("the length of the range overflows");
  return static_cast<int64_t>(count);
}

void infer_range(InferContext& context) {
  for (size_t i = 0; i < 3; ++i) {
    const Dim elements = checked_product(context.shape(i));
    if (context.rank(i) > 1 || (elements.is_constant() && !elements.is(1))) {
      throw ShapeError(
          str("input ", i, " must be a scalar, it has the shape ", shape_str(context.shape(i))));
    }
  }
  if (!context.known(0) || !context.known(1) || !context.known(2)) {
    return context.set_output(0, context.dtype(0), {context.unknown_extent(0, 0)});
  }
  const Dim start = context.known(0)->front();
  const Dim limit = context.known(1)->front();
  const Dim delta = context.known(2)->front();
  if (delta.is(0)) throw ShapeError("delta is zero");
  if (!delta.is_constant()) {
    return context.set_output(0, context.dtype(0), {context.unknown_extent(0, 0)});
  }
  if (!start.is_constant() || !limit.is_constant()) {
    // A symbolic range is taken not to be empty.
    const Dim length = delta.constant() > 0 ? ceil_div(limit - start, delta)
                                            : ceil_div(start - limit, Dim(0) - delta);
    return context.set_output(0, context.dtype(0), {length});
  }
  const int64_t length = range_length(start.constant(), limit.constant(), delta.constant());
  context.set_output(0, context.dtype(0), {Dim(length)});
  if (length > kMaxKnownRange || !kIndexTypes.contains(context.dtype(0))) return;
  std::vector<Dim> contents;
  for (int64_t i = 0; i < length; ++i) {
    // The sum fits, the product alone may not.
    contents.push_back(static_cast<int64_t>(static_cast<__int128>(start.constant()) +
                                            static_cast<__int128>(i) * delta.constant()));
  }
  context.set_known(0, std::move(contents));
}

}  // namespace

void register_range(OpRegistry& registry);
void register_range(OpRegistry& registry) {
  registry.add({.name = "Range",
                .since = 11,
                .summary = "start, start + delta, ... up to but without limit.",
                .inputs = {{"start", "T"}, {"limit", "T"}, {"delta", "T"}},
                .outputs = {{"output", "T"}},
                .types = {{"T", kFullFloatTypes | DTypeSet{DType::i16, DType::i32, DType::i64}}},
                .infer = infer_range,
                .differentiable = false});
}

}  // namespace ortrain::ops
