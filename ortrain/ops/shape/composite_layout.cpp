// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/ir/shape_inference.h"

namespace ortrain::ops {
namespace {

// "DCR" or "CRD": whether the blocks stand before or behind the channels.
bool blocks_first(ExpandContext& e) {
  const std::string& mode = e.attrs().string_("mode");
  if (mode != "DCR" && mode != "CRD") {
    throw InvalidModelError(str("mode '", mode, "' is neither 'DCR' nor 'CRD'"));
  }
  return mode == "DCR";
}

constexpr int64_t kMostBlock = 1 << 14;

struct Blocks {
  ValueId x;
  int64_t size, channels;

  explicit Blocks(ExpandContext& e)
      : x(e.input(0)), size(e.attrs().int_("blocksize")), channels(0) {
    if (size < 1 || size > kMostBlock) {
      throw InvalidModelError(str("attribute 'blocksize' is ", size));
    }
    if (e.rank(x) != 4) {
      throw ShapeError(str("the input is ", shape_str(e.shape(x)), ", expected [N, C, H, W]"));
    }
    channels = e.known_extent(x, 1, "the input");
  }
};

std::vector<ValueId> expand_depth_to_space(ExpandContext& e) {
  const Blocks b(e);
  const int64_t rest = b.channels / (b.size * b.size);
  if (rest * b.size * b.size != b.channels) {
    throw ShapeError(str(b.channels, " channels are no multiple of ", b.size, " squared"));
  }
  const bool first = blocks_first(e);
  const ValueId inner =
      e.int64s(first ? std::vector{b.size, b.size, rest} : std::vector{rest, b.size, b.size});
  const ValueId height = e.extent_of(b.x, 2), width = e.extent_of(b.x, 3);
  const ValueId batch = e.extent_of(b.x, 0);
  const ValueId split = e.reshape(b.x, e.concat({batch, inner, height, width}, 0));
  const ValueId moved = e.transpose(split, first ? std::vector<int64_t>{0, 3, 4, 1, 5, 2}
                                                 : std::vector<int64_t>{0, 1, 4, 2, 5, 3});
  const ValueId size = e.int64s({b.size});
  return {e.reshape(
      moved, e.concat({batch, e.int64s({rest}), e.mul(height, size), e.mul(width, size)}, 0))};
}

std::vector<ValueId> expand_space_to_depth(ExpandContext& e) {
  const Blocks b(e);
  const bool first = blocks_first(e);
  const int64_t channels = count_elements(b.channels, b.size, b.size);
  for (size_t axis : {2, 3}) {
    const Dim& extent = e.shape(b.x)[axis];
    if (extent.is_constant() && extent.constant() % b.size != 0) {
      throw ShapeError(
          str("axis ", axis, " of ", shape_str(e.shape(b.x)), " is no multiple of ", b.size));
    }
  }
  const ValueId size = e.int64s({b.size}), batch = e.extent_of(b.x, 0);
  const ValueId height = e.op("Div", {e.extent_of(b.x, 2), size});
  const ValueId width = e.op("Div", {e.extent_of(b.x, 3), size});
  const ValueId split =
      e.reshape(b.x, e.concat({batch, e.int64s({b.channels}), height, size, width, size}, 0));
  const ValueId moved = e.transpose(split, first ? std::vector<int64_t>{0, 3, 5, 1, 2, 4}
                                                 : std::vector<int64_t>{0, 1, 3, 5, 2, 4});
  return {e.reshape(moved, e.concat({batch, e.int64s({channels}), height, width}, 0))};
}

std::vector<ValueId> expand_center_crop_pad(ExpandContext& e) {
  ValueId x = e.input(0);
  const size_t rank = e.shape(x).size();
  const std::vector<int64_t> axes = given_axes_or_all(e.attrs().optional_ints("axes"), rank);
  const std::vector<int64_t> wanted = e.known_ints(1);
  if (wanted.size() != axes.size()) {
    throw ShapeError(str("'shape' has ", wanted.size(), " entries for ", axes.size(), " axes"));
  }
  std::vector<int64_t> pads(2 * rank, 0);
  for (size_t i = 0; i < axes.size(); ++i) {
    const size_t axis = static_cast<size_t>(axes[i]);
    const int64_t extent = e.known_extent(x, axis, "the input");
    if (wanted[i] < 0) throw ShapeError(str("'shape' has the entry ", wanted[i]));
    if (wanted[i] < extent) {
      const int64_t begin = (extent - wanted[i]) / 2;
      x = e.slice(x, axes[i], begin, begin + wanted[i]);
    } else {
      pads[axis] = (wanted[i] - extent) / 2;
      pads[rank + axis] = wanted[i] - extent - pads[axis];
    }
  }
  const bool padded = std::any_of(pads.begin(), pads.end(), [](int64_t n) { return n != 0; });
  return {padded ? e.op("Pad", {x, e.int64s(pads)}) : x};
}

std::vector<ValueId> expand_compress(ExpandContext& e) {
  ValueId x = e.input(0);
  std::optional<int64_t> axis = e.attrs().optional_int("axis");
  if (!axis) x = e.reshape(x, std::vector<int64_t>{-1});
  const int64_t along = normalize_axis(axis.value_or(0), e.shape(x).size());
  std::vector<int64_t> kept;
  const std::vector<int64_t> condition = e.known_ints(1);
  for (size_t i = 0; i < condition.size(); ++i) {
    if (condition[i] != 0) kept.push_back(static_cast<int64_t>(i));
  }
  return {e.op("Gather", {x, e.int64s(kept)}, {{"axis", along}})};
}

// The first sequence_lens[b] steps of each batch entry in reverse order.
std::vector<ValueId> expand_reverse_sequence(ExpandContext& e) {
  const ValueId x = e.input(0);
  const int64_t batch_axis = e.attrs().int_("batch_axis"), time_axis = e.attrs().int_("time_axis");
  if ((batch_axis != 0 && batch_axis != 1) || (time_axis != 0 && time_axis != 1) ||
      batch_axis == time_axis) {
    throw InvalidModelError("batch_axis and time_axis must be 0 and 1, or 1 and 0");
  }
  if (e.rank(x) < 2) throw ShapeError(str("the input is ", shape_str(e.shape(x)), ", of rank < 2"));
  std::vector<int64_t> exchange(e.shape(x).size());
  std::iota(exchange.begin(), exchange.end(), 0);
  std::swap(exchange[0], exchange[1]);
  const ValueId rows = batch_axis == 0 ? x : e.transpose(x, exchange);
  const ValueId step = e.positions(rows, 1);
  const ValueId length = e.unsqueeze(e.input(1), {1});
  const ValueId mirrored = e.sub(e.sub(length, step), e.int64s({1}));
  const ValueId source = e.where(e.op("Less", {step, length}), mirrored, step);
  const ValueId made =
      e.op("GatherND", {rows, e.unsqueeze(source, {2})}, {{"batch_dims", int64_t{1}}});
  return {batch_axis == 0 ? made : e.transpose(made, exchange)};
}

std::vector<ValueId> expand_scatter(ExpandContext& e) {
  return {e.op("ScatterElements", {e.input(0), e.input(1), e.input(2)},
               {{"axis", e.attrs().int_("axis")}})};
}

}  // namespace

void register_composite_layout(OpRegistry& registry);
void register_composite_layout(OpRegistry& registry) {
  const std::map<std::string, DTypeSet> all{{"T", kAllTypes}};
  const auto add_blocks = [&](const char* name, const char* summary, auto expand) {
    registry.add({.name = name,
                  .since = 1,
                  .summary = summary,
                  .inputs = {{"input", "T"}},
                  .outputs = {{"output", "T"}},
                  .attrs = {{"blocksize", AttributeKind::int_, true}, {"mode", std::string("DCR")}},
                  .types = all,
                  .expand = expand});
  };
  add_blocks("DepthToSpace", "Channels rearranged to blocks of space.", expand_depth_to_space);
  add_blocks("SpaceToDepth", "Blocks of space rearranged to channels.", expand_space_to_depth);
  registry.add({.name = "CenterCropPad",
                .since = 18,
                .summary = "Axes cropped or padded with zeros around the middle to given extents.",
                .inputs = {{"input_data", "T"}, {"shape", "Tind"}},
                .outputs = {{"output_data", "T"}},
                .attrs = {{"axes", AttributeKind::ints}},
                .types = {{"T", kAllTypes}, {"Tind", kIndexTypes}},
                .expand = expand_center_crop_pad});
  registry.add({.name = "Compress",
                .since = 9,
                .summary = "The slices for which a condition, known beforehand, holds.",
                .inputs = {{"input", "T"}, {"condition", "bool"}},
                .outputs = {{"output", "T"}},
                .attrs = {{"axis", AttributeKind::int_}},
                .types = all,
                .expand = expand_compress});
  registry.add({.name = "ReverseSequence",
                .since = 10,
                .summary = "The first sequence_lens[b] steps of each batch entry in reverse.",
                .inputs = {{"input", "T"}, {"sequence_lens", "int64"}},
                .outputs = {{"Y", "T"}},
                .attrs = {{"batch_axis", int64_t{1}}, {"time_axis", int64_t{0}}},
                .types = all,
                .expand = expand_reverse_sequence});
  registry.add({.name = "Scatter",
                .since = 9,
                .summary = "What ScatterElements is called since opset 11.",
                .inputs = {{"data", "T"}, {"indices", "Tind"}, {"updates", "T"}},
                .outputs = {{"output", "T"}},
                .attrs = {{"axis", int64_t{0}}},
                .types = {{"T", kAllTypes}, {"Tind", kIndexTypes}},
                .expand = expand_scatter});
}

}  // namespace ortrain::ops
