// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/row_packing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

using ::testing::ElementsAre;

// Key padding of `lengths` over `length` positions, for each query; `causal` hides later keys too.
std::vector<uint8_t> padding(const std::vector<int64_t>& lengths, int64_t length, bool causal) {
  std::vector<uint8_t> mask;
  for (int64_t kept : lengths) {
    for (int64_t i = 0; i < length; ++i) {
      for (int64_t j = 0; j < length; ++j) mask.push_back(j < kept && (!causal || j <= i));
    }
  }
  return mask;
}

std::optional<RowPacking> pack(const std::vector<uint8_t>& mask, int64_t batch, int64_t length,
                               std::vector<int64_t> picked = {0}) {
  const MaskView view{mask.data(), DType::boolean, {batch, 1, length, length}};
  return pack_rows(std::span(&view, 1), batch, length, picked);
}

TEST(RowPacking, KeepsWhatIsSeen) {
  const auto made = pack(padding({2, 9, 1}, 12, false), 3, 12);
  ASSERT_TRUE(made);
  EXPECT_FALSE(made->causal);
  EXPECT_THAT(made->offsets, ElementsAre(0, 2, 11, 12));
  EXPECT_THAT(made->positions,
              ElementsAre(0, 1, 12, 13, 14, 15, 16, 17, 18, 19, 20, 24, 0, 0, 0, 0));
  EXPECT_THAT(made->columns, ElementsAre(0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0));
  EXPECT_THAT(made->sequences, ElementsAre(0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 0, 0, 0, 0));
  EXPECT_THAT(made->picked, ElementsAre(ElementsAre(0, 2, 11)));
}

TEST(RowPacking, CausalMasks) {
  const auto made = pack(padding({2, 5}, 10, true), 2, 10);
  ASSERT_TRUE(made);
  EXPECT_TRUE(made->causal);
  EXPECT_THAT(made->offsets, ElementsAre(0, 2, 7));
}

TEST(RowPacking, MasksThatRepeat) {
  // One row of keys for all queries, and one mask for all sequences.
  const std::vector<uint8_t> keys{1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  const MaskView view{keys.data(), DType::boolean, {1, 1, 1, 12}};
  const std::vector<int64_t> picked{0};
  const auto made = pack_rows(std::span(&view, 1), 3, 12, picked);
  ASSERT_TRUE(made);
  EXPECT_THAT(made->offsets, ElementsAre(0, 2, 4, 6));
}

TEST(RowPacking, FloatMasks) {
  std::vector<float> keys(24, std::numeric_limits<float>::lowest());
  keys[0] = keys[1] = keys[12] = 0.0f;
  const MaskView view{keys.data(), DType::f32, {2, 1, 1, 12}};
  const std::vector<int64_t> picked{0};
  const auto made = pack_rows(std::span(&view, 1), 2, 12, picked);
  ASSERT_TRUE(made);
  EXPECT_THAT(made->offsets, ElementsAre(0, 2, 3));
  keys[5] = -2.5f;  // a bias, not a mask
  EXPECT_FALSE(pack_rows(std::span(&view, 1), 2, 12, picked));
}

TEST(RowPacking, RefusesWhatItCannotSay) {
  EXPECT_FALSE(pack(padding({12, 12}, 12, false), 2, 12)) << "nothing to gain";
  EXPECT_FALSE(pack(padding({0, 2}, 12, false), 2, 12)) << "row 0 is read but sees no key";
  std::vector<uint8_t> window = padding({4, 4}, 12, false);
  window[3] = 0;  // query 0 does not see key 3, the others do
  EXPECT_FALSE(pack(window, 2, 12));
  EXPECT_FALSE(pack(padding({2, 2}, 12, false), 2, 12, {12})) << "a position outside";
  const std::vector<uint8_t> some = padding({2, 2}, 12, false);
  const std::vector<uint8_t> other = padding({4, 4}, 12, false);
  const MaskView views[] = {{some.data(), DType::boolean, {2, 1, 12, 12}},
                            {other.data(), DType::boolean, {2, 1, 12, 12}}};
  EXPECT_FALSE(pack_rows(views, 2, 12, std::vector<int64_t>{0})) << "masks that differ";
}

TEST(RowPacking, AnyByteButZeroIsTrue) {
  std::vector<uint8_t> mask = padding({2, 4}, 12, false);
  for (uint8_t& byte : mask) byte *= 2;
  const auto made = pack(mask, 2, 12);
  ASSERT_TRUE(made);
  EXPECT_THAT(made->offsets, ElementsAre(0, 2, 6));
}

TEST(RowPacking, LeftPadding) {
  std::vector<uint8_t> mask;
  for (int64_t i = 0; i < 12; ++i) {
    for (int64_t j = 0; j < 12; ++j) mask.push_back(j >= 8 && j <= i);
  }
  const auto made = pack(mask, 1, 12, {11});
  ASSERT_TRUE(made);
  EXPECT_TRUE(made->causal);
  EXPECT_THAT(made->positions, ElementsAre(8, 9, 10, 11, 8, 8, 8, 8));
  EXPECT_THAT(made->picked, ElementsAre(ElementsAre(3)));
}

// A graph may promise a mask of as many keys as there are positions, and a call bring another.
TEST(RowPacking, MasksOfOtherShapesAreLeftAlone) {
  const std::vector<uint8_t> few{1, 1, 0, 0};
  const std::vector<int64_t> picked{0};
  const std::vector<Dims> shapes{{1, 1, 1, 4}, {2, 1, 1, 2}, {1, 1, 3, 4}, {1, 2, 1, 4}, {4}, {}};
  for (const Dims& dims : shapes) {
    const MaskView view{few.data(), DType::boolean, dims};
    EXPECT_FALSE(pack_rows(std::span(&view, 1), 3, 4096, picked));
  }
  const MaskView fits{few.data(), DType::boolean, {1, 1, 1, 4}};
  EXPECT_TRUE(pack_rows(std::span(&fits, 1), 8, 4, picked));
  const std::vector<int64_t> before{-1};
  EXPECT_FALSE(pack_rows(std::span(&fits, 1), 8, 4, before));
  EXPECT_THROW(pack_rows({}, int64_t{1} << 40, int64_t{1} << 40, picked), ShapeError);
  EXPECT_THROW(pack_rows({}, -1, 3, picked), ShapeError);
}

}  // namespace
}  // namespace ortrain
