// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "ortrain/base/error.h"
#include "ortrain/ir/graph_builder.h"

namespace ortrain {
namespace {

// A graph with one input x: float32[b, s, 12].
class ShapeArithmetic : public ::testing::Test {
 protected:
  ShapeArithmetic() : builder(graph) {
    x = graph.add_input({.role = InputRole::user}, "x", DType::f32, {b, s, Dim(12)});
  }

  const std::optional<std::vector<Dim>>& known(ValueId id) { return graph.value(id).known; }
  ValueId dim(ValueId value, int64_t axis) {
    return builder.op("Gather", {builder.op("Shape", {value}), builder.int64s({axis})});
  }

  Dim b = Dim::symbol("b");
  Dim s = Dim::symbol("s");
  Graph graph;
  GraphBuilder builder;
  ValueId x;
};

TEST_F(ShapeArithmetic, ShapeGatherConcatReshape) {
  const ValueId shape = builder.op("Concat", {dim(x, 0), builder.int64s({-1, 3, 4})},
                                   {{"axis", int64_t{0}}});
  ASSERT_TRUE(known(shape));
  EXPECT_EQ(*known(shape), (std::vector<Dim>{b, Dim(-1), Dim(3), Dim(4)}));
  const ValueId heads = builder.op("Reshape", {x, shape});
  EXPECT_EQ(builder.shape(heads), (Shape{b, s, Dim(3), Dim(4)}));
}

TEST_F(ShapeArithmetic, ReshapeSolvesProducts) {
  EXPECT_EQ(builder.shape(builder.reshape(x, std::vector<int64_t>{-1, 12})),
            (Shape{b * s, Dim(12)}));
  EXPECT_EQ(builder.shape(builder.reshape(x, std::vector<int64_t>{0, -1})),
            (Shape{b, Dim(12) * s}));
  const ValueId flat = builder.reshape(x, std::vector<int64_t>{-1});
  EXPECT_EQ(builder.shape(builder.reshape(flat, builder.op("Shape", {x}))),
            (Shape{b, s, Dim(12)}));
  EXPECT_EQ(builder.shape(builder.op("Flatten", {x}, {{"axis", int64_t{2}}})),
            (Shape{b * s, Dim(12)}));
}

TEST_F(ShapeArithmetic, SizeRangeAndProducts) {
  EXPECT_EQ(*known(builder.op("Size", {x})), (std::vector<Dim>{Dim(12) * b * s}));
  const ValueId leading = builder.op("Slice", {builder.op("Shape", {x}), builder.int64s({0}),
                                               builder.int64s({-1})});
  EXPECT_EQ(*known(leading), (std::vector<Dim>{b, s}));
  const ValueId product =
      builder.op("ReduceProd", {leading}, {{"keepdims", int64_t{0}}});
  EXPECT_EQ(*known(product), (std::vector<Dim>{b * s}));
  const ValueId zero = builder.constant(TensorData::int_scalar(DType::i64, 0));
  const ValueId one = builder.constant(TensorData::int_scalar(DType::i64, 1));
  EXPECT_EQ(builder.shape(builder.op("Range", {zero, product, one})), (Shape{b * s}));
  EXPECT_EQ(builder.shape(builder.op("ConstantOfShape", {leading})), (Shape{b, s}));
  EXPECT_EQ(*known(builder.op("Unsqueeze", {product, builder.int64s({0})})),
            (std::vector<Dim>{b * s}));
}

TEST_F(ShapeArithmetic, ExpandTakesSymbols) {
  const ValueId row = graph.add_input({.role = InputRole::user}, "row", DType::f32,
                                      {Dim(1), Dim(1), Dim(12)});
  EXPECT_EQ(builder.shape(builder.op("Expand", {row, builder.op("Shape", {x})})),
            (Shape{b, s, Dim(12)}));
}

TEST_F(ShapeArithmetic, SliceAndSplit) {
  const auto slice = [&](int64_t start, int64_t end, int64_t step = 1) {
    return builder.shape(builder.op("Slice", {x, builder.int64s({start}), builder.int64s({end}),
                                              builder.int64s({1}), builder.int64s({step})}))[1];
  };
  EXPECT_EQ(slice(1, INT64_MAX), s - Dim(1));
  EXPECT_EQ(slice(0, -1), s - Dim(1));
  EXPECT_EQ(slice(0, 1), Dim(1));
  EXPECT_EQ(slice(-1, INT64_MAX), Dim(1));
  EXPECT_EQ(slice(-1, INT64_MIN, -1), s);
  EXPECT_EQ(slice(0, 512), min(Dim(512), s));
  const std::vector<ValueId> halves =
      builder.node("", "Split", {builder.reshape(x, std::vector<int64_t>{-1})},
                   {{"num_outputs", int64_t{3}}}, {true, true, true});
  for (ValueId part : halves) EXPECT_EQ(builder.shape(part), (Shape{Dim(4) * b * s}));
  const std::vector<ValueId> parts = builder.node(
      "", "Split", {builder.op("Shape", {x}), builder.int64s({1, 2})}, {}, {true, true});
  EXPECT_EQ(*known(parts[0]), (std::vector<Dim>{b}));
  EXPECT_EQ(*known(parts[1]), (std::vector<Dim>{s, Dim(12)}));
}

TEST_F(ShapeArithmetic, ConcatAndPadAddUp) {
  const ValueId doubled = builder.op("Concat", {x, x}, {{"axis", int64_t{1}}});
  EXPECT_EQ(builder.shape(doubled), (Shape{b, Dim(2) * s, Dim(12)}));
  const ValueId padded = builder.op("Pad", {x, builder.int64s({0, 2, 0, 0, 1, 0})});
  EXPECT_EQ(builder.shape(padded), (Shape{b, s + Dim(3), Dim(12)}));
}

TEST_F(ShapeArithmetic, DataDependentContentsAreRefusedWithTheNameOfTheInput) {
  const ValueId target = graph.add_input({.role = InputRole::user}, "target", DType::i64, {Dim(2)});
  try {
    builder.op("Expand", {x, target});
    FAIL() << "was not refused";
  } catch (const UnsupportedError& error) {
    EXPECT_NE(std::string(error.what()).find("input 'shape' must be a constant"),
              std::string::npos)
        << error.what();
  }
  // Of Reshape only the extents stay open.
  EXPECT_EQ(builder.rank(builder.op("Reshape", {x, target})), 2);
}

TEST_F(ShapeArithmetic, ExtentsOverflow) {
  const auto input = [this](const char* name, int64_t extent) {
    return graph.add_input({.role = InputRole::user}, name, DType::u8, {Dim(extent)});
  };
  EXPECT_THROW(input("beyond_memory", int64_t{1} << 62), ShapeError);
  const ValueId huge = input("huge", int64_t{1} << 47);
  EXPECT_THROW(builder.op("Concat", {huge, huge}, {{"axis", int64_t{0}}}), ShapeError);
  EXPECT_THROW(builder.op("Tile", {huge, builder.int64s({4})}), ShapeError);
  EXPECT_THROW(builder.op("Tile", {huge, builder.int64s({int64_t{1} << 62})}), ShapeError);
  EXPECT_THROW(builder.op("Pad", {huge, builder.int64s({int64_t{1} << 62, 0})}), ShapeError);
}

}  // namespace
}  // namespace ortrain
