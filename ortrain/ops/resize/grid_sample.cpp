// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::ops {
namespace {

enum class Padding { zeros, border, reflection };

// One neighbour of each output position along one axis.
struct Neighbour {
  ValueId index;   // [N, P] int64, inside of the axis
  ValueId inside;  // [N, P] bool; kNoValue: all are
  ValueId weight;  // [N, P]; kNoValue: 1
};

// X [N, C, D1, ..., Dk] at the P positions of a grid [N, P, k], whose coordinates go from -1 to 1
// and stand in reverse order of the axes. As PyTorch's grid_sample: neighbours out of X are zeros,
// or coordinates (of neighbours, for cubic) are moved to the border or mirrored there first.
class GridSampler {
 public:
  explicit GridSampler(ExpandContext& e)
      : e_(e), x_(e.input(0)), align_(e.attrs().int_("align_corners") != 0) {
    const Shape& x = e.shape(x_);
    const Shape& grid = e.shape(e.input(1));
    axes_ = static_cast<int64_t>(x.size()) - 2;
    if (axes_ < 1 || grid.size() != x.size() || !(grid.back().is(axes_))) {
      throw ShapeError(str("X is ", shape_str(x), ", the grid ", shape_str(grid),
                           "; expected [N, C, D1, ...] and [N, O1, ..., number of axes]"));
    }
    if (axes_ > 3) {  // the neighbours double with each
      throw UnsupportedError(str("a grid over ", axes_, " axes; up to 3 are supported"));
    }
    const std::string& padding = e.attrs().string_("padding_mode");
    if (padding == "border") {
      padding_ = Padding::border;
    } else if (padding == "reflection") {
      padding_ = Padding::reflection;
    } else if (padding != "zeros") {
      throw InvalidModelError(str("padding_mode '", padding, "' is not known"));
    }
    mode_ = e.attrs().string_("mode");
    // Before opset 20 the modes had PyTorch's names.
    if (mode_ == "bilinear") mode_ = "linear";
    if (mode_ == "bicubic") mode_ = "cubic";
    if (mode_ != "linear" && mode_ != "nearest" && mode_ != "cubic") {
      throw InvalidModelError(str("mode '", mode_, "' is not known"));
    }
    if (mode_ == "cubic" && axes_ != 2) {
      throw UnsupportedError(str("cubic interpolation over ", axes_, " axes; 2 are supported"));
    }
    // 16 bits do not hold positions of large images.
    type_ = size_of(e.dtype(x_)) == 2 ? DType::f32 : e.dtype(x_);
  }

  ValueId build() {
    ValueId grid = e_.cast(e_.input(1), type_);
    const ValueId batch = e_.extent_of(x_, 0);
    grid = e_.reshape(grid, e_.concat({batch, e_.int64s({-1, axes_})}, 0));
    std::vector<std::vector<Neighbour>> neighbours;
    for (int64_t axis = 0; axis < axes_; ++axis) {
      const ValueId coordinate = e_.squeeze(e_.slice(grid, 2, axes_ - 1 - axis, axes_ - axis), {2});
      neighbours.push_back(along(axis, coordinate));
    }
    // [N, S, C]: a position picks all channels at once.
    const ValueId rows = e_.transpose(
        e_.reshape(x_, e_.concat({batch, e_.extent_of(x_, 1), e_.int64s({-1})}, 0)), {0, 2, 1});
    rows_ = e_.cast(rows, type_);
    const ValueId sum = sum_over(neighbours, 0, kNoValue, kNoValue, kNoValue);
    std::vector<ValueId> extents{batch, e_.extent_of(x_, 1)};
    for (int64_t axis = 1; axis <= axes_; ++axis) {
      extents.push_back(e_.extent_of(e_.input(1), axis));
    }
    const ValueId made = e_.reshape(e_.transpose(sum, {0, 2, 1}), e_.concat(extents, 0));
    return e_.cast(made, e_.dtype(x_));
  }

 private:
  ValueId number(double value) { return e_.scalar(type_, value); }

  // The extent of a spatial axis as a scalar of type `type`.
  ValueId extent(int64_t axis, DType type) {
    return e_.cast(e_.squeeze(e_.extent_of(x_, axis + 2), {0}), type);
  }

  std::vector<Neighbour> along(int64_t axis, ValueId coordinate) {
    const ValueId size = extent(axis, type_);
    const ValueId from_zero = e_.add(coordinate, 1.0);
    ValueId position = align_ ? e_.mul(e_.div(from_zero, 2.0), e_.sub(size, 1.0))
                              : e_.div(e_.sub(e_.mul(from_zero, size), number(1.0)), 2.0);
    if (mode_ != "cubic") position = padded(position, size);
    if (mode_ == "nearest") return {at(axis, e_.unary("Round", position), size, kNoValue)};
    const ValueId low = e_.unary("Floor", position);
    const ValueId part = e_.sub(position, low);
    if (mode_ == "linear") {
      return {at(axis, low, size, e_.sub(number(1.0), part)),
              at(axis, e_.add(low, 1.0), size, part)};
    }
    std::vector<Neighbour> result;
    const std::array<ValueId, 4> weights = cubic_weights(part);
    for (int i = 0; i < 4; ++i) {
      const ValueId place = padded(e_.add(low, static_cast<double>(i - 1)), size);
      result.push_back(at(axis, place, size, weights[static_cast<size_t>(i)]));
    }
    return result;
  }

  ValueId padded(ValueId position, ValueId size) {
    if (padding_ == Padding::zeros) return position;
    if (padding_ == Padding::reflection) position = mirrored(position, size);
    // Where it is moved, and at the border itself, nothing depends on it: PyTorch's gradient.
    const ValueId zero = number(0.0), last = e_.sub(size, number(1.0));
    const ValueId below = e_.where(e_.op("GreaterOrEqual", {position, last}), last, position);
    return e_.where(e_.op("LessOrEqual", {position, zero}), zero, below);
  }

  // Mirrored at 0 and size - 1, or half an element beyond.
  ValueId mirrored(ValueId position, ValueId size) {
    const double low = align_ ? 0.0 : -0.5;
    const ValueId span = align_ ? e_.sub(size, number(1.0)) : size;
    const ValueId zero = number(0.0), one = number(1.0);
    // An axis of one element with aligned corners has no span.
    const ValueId is_point = e_.op("Equal", {span, zero});
    const ValueId divisor = e_.where(is_point, one, span);
    const ValueId distance = e_.unary("Abs", e_.sub(position, low));
    const ValueId flips = e_.unary("Floor", e_.div(distance, divisor));
    const ValueId rest = e_.sub(distance, e_.mul(flips, divisor));
    const ValueId half = e_.mul(flips, 0.5);
    const ValueId is_even = e_.op("Equal", {half, e_.unary("Floor", half)});
    const ValueId made = e_.add(e_.where(is_even, rest, e_.sub(divisor, rest)), low);
    return e_.where(is_point, zero, made);
  }

  Neighbour at(int64_t axis, ValueId place, ValueId size, ValueId weight) {
    const ValueId last = e_.sub(size, number(1.0));
    ValueId inside = kNoValue;
    if (padding_ == Padding::zeros) {
      inside = e_.op("And", {e_.op("GreaterOrEqual", {place, number(0.0)}),
                             e_.op("LessOrEqual", {place, last})});
      place = e_.where(inside, place, number(0.0));  // NaN, too, points to nothing
    } else {
      // Behind the last element stands a neighbour of weight 0; NaN points to nothing.
      const ValueId known = e_.op("Equal", {place, place});
      place = e_.op("Clip", {e_.where(known, place, number(0.0)), number(0.0), last});
    }
    ValueId index = e_.cast(place, DType::i64);
    if (axis + 1 < axes_) index = e_.mul(index, stride(axis));
    return {index, inside, weight};
  }

  // Elements between two positions of an axis, an int64 scalar.
  ValueId stride(int64_t axis) {
    ValueId product = extent(axis + 1, DType::i64);
    for (int64_t k = axis + 2; k < axes_; ++k) product = e_.mul(product, extent(k, DType::i64));
    return product;
  }

  // Cubic convolution with a = -0.75 (Keys 1981) at distances 1 + t, t, 1 - t and 2 - t.
  std::array<ValueId, 4> cubic_weights(ValueId t) {
    constexpr double a = -0.75;
    const auto near = [&](ValueId d) {  // ((a + 2) d - (a + 3)) d^2 + 1
      const ValueId slope = e_.sub(e_.mul(d, a + 2), a + 3);
      return e_.add(e_.mul(slope, e_.mul(d, d)), 1.0);
    };
    const auto far = [&](ValueId d) {  // ((a d - 5 a) d + 8 a) d - 4 a
      const ValueId inner = e_.add(e_.mul(e_.sub(e_.mul(d, a), 5 * a), d), 8 * a);
      return e_.sub(e_.mul(inner, d), 4 * a);
    };
    const ValueId rest = e_.sub(number(1.0), t);
    return {far(e_.add(t, 1.0)), near(t), near(rest), far(e_.add(rest, 1.0))};
  }

  ValueId both(std::string_view op, ValueId a, ValueId b) {
    if (a == kNoValue) return b;
    return b == kNoValue ? a : e_.op(op, {a, b});
  }

  ValueId zeros_outside(ValueId values, ValueId inside) {
    return e_.where(e_.unsqueeze(inside, {2}), values, number(0.0));
  }

  // The sum over all combinations of neighbours of the axes from `axis` on: [N, P, C].
  ValueId sum_over(const std::vector<std::vector<Neighbour>>& neighbours, size_t axis,
                   ValueId index, ValueId inside, ValueId weight) {
    if (axis == neighbours.size()) {
      ValueId values =
          e_.op("GatherND", {rows_, e_.unsqueeze(index, {2})}, {{"batch_dims", int64_t{1}}});
      // In images the weight of a position that is NaN or infinite makes NaN of zeros, in volumes
      // it counts for nothing.
      const bool zeros_first = axes_ == 2;
      if (inside != kNoValue && zeros_first) values = zeros_outside(values, inside);
      if (weight != kNoValue) values = e_.mul(values, e_.unsqueeze(weight, {2}));
      if (inside != kNoValue && !zeros_first) values = zeros_outside(values, inside);
      return values;
    }
    ValueId sum = kNoValue;
    for (const Neighbour& n : neighbours[axis]) {
      const ValueId part = sum_over(neighbours, axis + 1, both("Add", index, n.index),
                                    both("And", inside, n.inside), both("Mul", weight, n.weight));
      sum = both("Add", sum, part);
    }
    return sum;
  }

  ExpandContext& e_;
  ValueId x_;
  ValueId rows_ = kNoValue;
  bool align_;
  int64_t axes_ = 0;
  Padding padding_ = Padding::zeros;
  std::string mode_;
  DType type_ = DType::f32;
};

// Coordinates from -1 to 1 along an axis of `extent` positions, moved by theta.
std::vector<ValueId> expand_affine_grid(ExpandContext& e) {
  const ValueId theta = e.input(0);
  const std::vector<int64_t> size = e.known_ints(1);
  const int64_t axes = static_cast<int64_t>(size.size()) - 2;
  if (axes < 1 || e.rank(theta) != 3) {
    throw ShapeError(str("theta is ", shape_str(e.shape(theta)), ", size has ", size.size(),
                         " entries; expected [N, axes, axes + 1] and [N, C, D1, ...]"));
  }
  const bool align = e.attrs().int_("align_corners") != 0;
  const DType type = e.dtype(theta);
  const Dims out(size.begin() + 2, size.end());
  // Homogeneous coordinates of all positions, the last axis first: [D1, ..., axes + 1].
  std::vector<int64_t> whole(out);
  whole.push_back(1);
  const ValueId extents = e.int64s(whole);
  std::vector<ValueId> parts;
  for (int64_t k = axes - 1; k >= 0; --k) {
    const int64_t extent = out[static_cast<size_t>(k)];
    if (extent < 1) throw ShapeError(str("size has the entry ", extent));
    const ValueId count = e.constant(TensorData::int_scalar(DType::i64, extent));
    const ValueId index = e.op("Range", {e.scalar(DType::i64, 0), count, e.scalar(DType::i64, 1)});
    const ValueId twice = e.mul(e.cast(index, DType::f64), 2.0);
    const double n = static_cast<double>(extent);
    ValueId along = e.sub(e.div(e.add(twice, 1.0), n), 1.0);
    if (align) along = extent == 1 ? e.mul(twice, 0.0) : e.sub(e.div(twice, n - 1.0), 1.0);
    std::vector<int64_t> shape(static_cast<size_t>(axes) + 1, 1);
    shape[static_cast<size_t>(k)] = extent;
    parts.push_back(e.op("Expand", {e.reshape(along, shape), extents}));
  }
  parts.push_back(e.op("Expand", {e.scalar(DType::f64, 1.0), extents}));
  const ValueId positions =
      e.cast(e.reshape(e.concat(parts, axes), std::vector<int64_t>{-1, axes + 1}), type);
  const ValueId moved = e.op("MatMul", {positions, e.transpose(theta, {0, 2, 1})});  // [N, P, axes]
  std::vector<int64_t> shape{0};
  shape.insert(shape.end(), out.begin(), out.end());
  shape.push_back(axes);
  return {e.reshape(moved, shape)};
}

}  // namespace

void register_grid_sample(OpRegistry& registry);
void register_grid_sample(OpRegistry& registry) {
  registry.add({.name = "GridSample",
                .since = 16,
                .summary = "X at the positions of a grid, by linear or cubic interpolation or as "
                           "its nearest element.",
                .inputs = {{"X", "T1"}, {"grid", "T2"}},
                .outputs = {{"Y", "T1"}},
                .attrs = {{"mode", std::string("linear")},
                          {"padding_mode", std::string("zeros")},
                          {"align_corners", int64_t{0}}},
                .types = {{"T1", kFloatTypes}, {"T2", kFloatTypes}},
                .expand = [](ExpandContext& e) { return std::vector{GridSampler(e).build()}; }});
  registry.add({.name = "AffineGrid",
                .since = 20,
                .summary = "The grid that an affine transformation of each batch entry reads at.",
                .inputs = {{"theta", "T1"}, {"size", "int64"}},
                .outputs = {{"grid", "T1"}},
                .attrs = {{"align_corners", int64_t{0}}},
                .types = {{"T1", kFloatTypes}},
                .expand = expand_affine_grid});
}

}  // namespace ortrain::ops
