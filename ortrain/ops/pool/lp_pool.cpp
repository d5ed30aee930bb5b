// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ops/window/window.h"

namespace ortrain::ops {
namespace {

int64_t exponent(ExpandContext& e) {
  const int64_t p = e.attrs().int_("p");
  if (p < 1) throw InvalidModelError(str("attribute 'p' is ", p, ", expected 1 or more"));
  return p;
}

ValueId powers(ExpandContext& e, int64_t p) {
  const ValueId size = e.unary("Abs", e.input(0));
  if (p == 1) return size;
  return e.op("Pow", {size, e.scalar(e.dtype(size), static_cast<double>(p))});
}

ValueId root(ExpandContext& e, ValueId sum, int64_t p) {
  if (p == 1) return sum;
  if (p == 2) return e.unary("Sqrt", sum);
  return e.op("Pow", {sum, e.scalar(e.dtype(sum), 1.0 / static_cast<double>(p))});
}

// Pads for which no window ends outside, in place of sizes that are rounded up. A window starts
// inside of the input or its first padding.
std::vector<int64_t> pads_for_whole_windows(ExpandContext& e, size_t axes) {
  for (int64_t pad : e.attrs().optional_ints("pads").value_or(std::vector<int64_t>{})) {
    constexpr int64_t kMost = int64_t{1} << 31;
    if (pad < 0 || pad > kMost) throw InvalidModelError(str("'pads' has the entry ", pad));
  }
  Windows windows = read_windows(e.attrs(), axes, {});
  for (size_t i = 0; i < axes; ++i) {
    const int64_t extent = e.known_extent(e.input(0), i + 2, "X");
    const int64_t last = window_count(windows, i, Dim(extent)).constant() - 1;
    const int64_t end = last * windows.strides[i] + windows.span(i) - windows.pads[i];
    windows.pads[axes + i] = std::max(windows.pads[axes + i], end - extent);
  }
  return windows.pads;
}

// The sum of a window is the average, padding counted, times its size.
std::vector<ValueId> expand_lp_pool(ExpandContext& e) {
  const int64_t p = exponent(e);
  const std::vector<int64_t> kernel = e.attrs().ints("kernel_shape");
  Attributes attributes{{"kernel_shape", kernel},
                        {"auto_pad", e.attrs().string_("auto_pad")},
                        {"count_include_pad", int64_t{1}}};
  for (const char* name : {"pads", "strides", "dilations"}) {
    if (const auto given = e.attrs().optional_ints(name)) attributes.emplace(name, *given);
  }
  if (e.attrs().int_("ceil_mode") != 0 && e.attrs().string_("auto_pad") == "NOTSET") {
    attributes["pads"] = pads_for_whole_windows(e, kernel.size());
  }
  double size = 1;
  for (int64_t extent : kernel) size *= static_cast<double>(extent);
  const ValueId mean = e.op("AveragePool", {powers(e, p)}, std::move(attributes));
  return {root(e, e.mul(mean, size), p)};
}

std::vector<ValueId> expand_global_lp_pool(ExpandContext& e) {
  const int64_t p = exponent(e);
  std::vector<int64_t> axes;
  for (int64_t axis = 2; axis < e.rank(e.input(0)); ++axis) axes.push_back(axis);
  return {root(e, e.reduce("ReduceSum", powers(e, p), axes, true), p)};
}

}  // namespace

void register_lp_pool(OpRegistry& registry);
void register_lp_pool(OpRegistry& registry) {
  std::vector<FormalAttribute> attributes = window_attributes(true);
  attributes.push_back({"ceil_mode", int64_t{0}});
  attributes.push_back({"p", int64_t{2}});
  registry.add({.name = "LpPool",
                .since = 2,
                .summary = "The p-norm of each window.",
                .inputs = {{"X", "T"}},
                .outputs = {{"Y", "T"}},
                .attrs = std::move(attributes),
                .types = {{"T", kFloatTypes}},
                .expand = expand_lp_pool});
  registry.add({.name = "GlobalLpPool",
                .since = 2,
                .summary = "The p-norm over all spatial axes.",
                .inputs = {{"X", "T"}},
                .outputs = {{"Y", "T"}},
                .attrs = {{"p", int64_t{2}}},
                .types = {{"T", kFloatTypes}},
                .expand = expand_global_lp_pool});
}

}  // namespace ortrain::ops
