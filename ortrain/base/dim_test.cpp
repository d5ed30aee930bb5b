// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/dim.h"

#include <gtest/gtest.h>

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

const Dim kA = Dim::symbol("a");
const Dim kB = Dim::symbol("b");

TEST(dim, arithmetic_is_that_of_polynomials) {
  EXPECT_EQ((kA + kB) * (kA - kB), kA * kA - kB * kB);
  EXPECT_EQ((kA + Dim(1)) * Dim(2) - Dim(2) * kA, Dim(2));
  EXPECT_EQ(kA - kA, Dim(0));
  EXPECT_EQ(floor_div(Dim(6) * kA * kB + Dim(4) * kA, Dim(2) * kA), Dim(3) * kB + Dim(2));
  EXPECT_EQ(floor_div(Dim(-7), Dim(2)), Dim(-4));
  EXPECT_EQ(ceil_div(Dim(-7), Dim(2)), Dim(-3));
  EXPECT_EQ(ceil_div(Dim(7), Dim(2)), Dim(4));
  EXPECT_EQ(max(kA + Dim(1), kA), kA + Dim(1));
  EXPECT_EQ(min(kA, kB).str(), "min(a, b)");
}

TEST(dim, text_reads_back) {
  for (const Dim& dim : {Dim(0), Dim(-3), kA, Dim(2) * kA * kB - kB + Dim(7), max(kA, kB) * kA,
                         floor_div(kA, Dim(2)), Dim(INT64_MAX), Dim(-INT64_MAX), Dim(-1) * kA}) {
    EXPECT_EQ(Dim::parse(dim.str()), dim) << dim.str();
  }
}

TEST(dim, symbols) {
  EXPECT_TRUE(Dim(3).symbols().empty());
  EXPECT_EQ((kA * kB + kA + Dim(1)).symbols(), (std::set<std::string>{"a", "b"}));
  EXPECT_EQ(max(kA, kB).symbols(), (std::set<std::string>{"max(a, b)"}));
}

TEST(dim, evaluate) {
  EXPECT_EQ((Dim(2) * kA * kB - Dim(1)).evaluate({{"a", 3}, {"b", 4}}), 23);
  EXPECT_EQ((kA * kB).evaluate({{"a", 3}}), std::nullopt);
  EXPECT_THROW((kA * kA).evaluate({{"a", INT64_MAX}}), ShapeError);
}

TEST(dim, overflow_is_a_shape_error) {
  const Dim huge(INT64_MAX);
  const Dim lowest(INT64_MIN);
  EXPECT_THROW(huge + Dim(1), ShapeError);
  EXPECT_THROW(lowest - Dim(1), ShapeError);
  EXPECT_THROW(huge * Dim(2), ShapeError);
  EXPECT_THROW(huge * kA + kA, ShapeError);
  EXPECT_THROW((huge * kA) * kB * Dim(2), ShapeError);
  EXPECT_THROW(floor_div(lowest, Dim(-1)), ShapeError);
  EXPECT_THROW(ceil_div(lowest, Dim(2)), ShapeError);
  EXPECT_THROW(floor_div(Dim(1), Dim(0)), ShapeError);
  EXPECT_EQ(floor_div(Dim(7), Dim(-1)), Dim(-7));
}

TEST(dim, expressions_are_bounded) {
  Dim degree = kA;
  EXPECT_THROW(
      {
        for (int i = 0; i < 40; ++i) degree = degree * degree;
      },
      ShapeError);
  EXPECT_THROW(
      {
        Dim power = kA + kB + Dim::symbol("c") + Dim::symbol("d") + Dim(1);
        for (int i = 0; i < 10; ++i) power = power * power;
      },
      ShapeError);
  EXPECT_THROW(
      {
        Dim sum(0);
        for (int i = 0; i < 1000; ++i) sum = sum + Dim::symbol("s" + std::to_string(i));
      },
      ShapeError);
  EXPECT_THROW(
      {
        Dim text = kA;
        for (int i = 0; i < 40; ++i) text = max(text + Dim(1), kB * text);
      },
      ShapeError);
}

TEST(dim, takes_64_kilobytes_at_most) {
  EXPECT_EQ(Dim(INT64_MAX).weight(), 0u);
  EXPECT_GT((kA * kB + kA).weight(), kA.weight());
  const auto sum_of = [](int terms, size_t length) {
    Dim sum(0);
    for (int i = 0; i < terms; ++i) {
      sum = sum + Dim::symbol(std::string(length, 's') + std::to_string(i));
    }
    return sum;
  };
  EXPECT_LE(sum_of(500, 4).weight(), 65536u);
  EXPECT_LE(sum_of(20, 1000).weight(), 65536u);
  EXPECT_THROW(sum_of(20, 4000), ShapeError);
  EXPECT_THROW(sum_of(600, 4), ShapeError);
  EXPECT_THROW(Dim::symbol(std::string(10000, 's')), ShapeError);
  EXPECT_THROW(Dim::parse(std::string(10000, '?')), ShapeError);
}

TEST(dim, the_lesser_of_two_integers_needs_no_difference) {
  EXPECT_EQ(min(Dim(INT64_MAX), Dim(-1)), Dim(-1));
  EXPECT_EQ(min(Dim(INT64_MIN), Dim(1)), Dim(INT64_MIN));
  EXPECT_EQ(max(Dim(-2), Dim(INT64_MAX)), Dim(INT64_MAX));
  EXPECT_EQ(max(Dim(1), Dim(INT64_MIN)), Dim(1));
}

TEST(dim, the_smallest_integer_reads_as_it_prints) {
  const Dim least(INT64_MIN);
  for (const Dim& dim : {kA + least, kA * least, kA * least + kB - Dim(3), kA * Dim(-2) - kB}) {
    EXPECT_EQ(Dim::parse(dim.str()), dim) << dim.str();
  }
  EXPECT_EQ(Dim::parse("a - -2*(b - 1)"), kA + Dim(2) * kB - Dim(2));
}

TEST(dim, broadcast_of_symbols) {
  EXPECT_EQ(broadcast(kA, Dim(1)), kA);
  EXPECT_EQ(broadcast(kA, Dim(4)), Dim(4));
  EXPECT_EQ(broadcast(kA, kB).str(), "broadcast(a, b)");
  EXPECT_THROW(broadcast(Dim(2), Dim(3)), ShapeError);
}

}  // namespace
}  // namespace ortrain
