// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/matrix_fragment.h"

#include <gtest/gtest.h>

#include <vector>

#include "ortrain/gpu/launch.h"
#include "ortrain/gpu/reduce.h"

namespace ortrain::gpu {
namespace {

constexpr int kLd = 24;

// d = a b by one of two warps, with the factors stored as they are or transposed.
template <class T>
__global__ void product(const T* a, bool a_transposed, const T* b, bool b_transposed, float* d) {
  T* tiles = dynamic_shared<T>() + warp() * 2 * 16 * kLd;
  for (int i = lane(); i < 256; i += kWarpSize) {
    tiles[i / 16 * kLd + i % 16] = a[warp() * 256 + i];
    tiles[(16 + i / 16) * kLd + i % 16] = b[warp() * 256 + i];
  }
  warp_barrier();
  FragmentA<T> left;
  FragmentB<T> right;
  if (a_transposed) {
    left.load_transposed(tiles, kLd);
  } else {
    left.load(tiles, kLd);
  }
  if (b_transposed) {
    right.load_transposed(tiles + 16 * kLd, kLd);
  } else {
    right.load(tiles + 16 * kLd, kLd);
  }
  Accumulator sums;
  sums.fill(1.0f);
  multiply_add(sums, left, right);
  for (int i = 0; i < Accumulator::kElements; ++i) {
    d[warp() * 256 + Accumulator::row_of(i) * 16 + Accumulator::column_of(i)] = sums[i];
  }
}

// d = (a b) c, and the sums of the rows of a b.
__global__ void chain(const Float16* a, const Float16* b, const Float16* c, float* d, float* rows) {
  auto* tiles = dynamic_shared<Float16>();
  for (int i = lane(); i < 256; i += kWarpSize) {
    tiles[i / 16 * kLd + i % 16] = a[i];
    tiles[(16 + i / 16) * kLd + i % 16] = b[i];
    tiles[(32 + i / 16) * kLd + i % 16] = c[i];
  }
  warp_barrier();
  FragmentA<Float16> left;
  FragmentB<Float16> right;
  left.load(tiles, kLd);
  right.load(tiles + 16 * kLd, kLd);
  Accumulator first, second;
  first.fill(0);
  second.fill(0);
  multiply_add(first, left, right);
  float sums[Accumulator::kRows] = {};
  for (int i = 0; i < Accumulator::kElements; ++i) sums[Accumulator::row_slot(i)] += first[i];
  for (int s = 0; s < Accumulator::kRows; ++s) {
    rows[Accumulator::row_of_slot(s)] = Accumulator::reduce_over_row(sums[s], Sum());
  }
  left.from(first);
  right.load(tiles + 32 * kLd, kLd);
  multiply_add(second, left, right);
  for (int i = 0; i < Accumulator::kElements; ++i) {
    d[Accumulator::row_of(i) * 16 + Accumulator::column_of(i)] = second[i];
  }
}

// Small integers: every sum is exact in every type.
template <class T>
std::vector<T> numbers(int count, int step) {
  std::vector<T> values;
  for (int i = 0; i < count; ++i) values.push_back(T(static_cast<float>(i * step % 7 - 3)));
  return values;
}

template <class T>
void check_products() {
  const std::vector<T> a = numbers<T>(512, 5), b = numbers<T>(512, 3);
  for (const bool a_transposed : {false, true}) {
    for (const bool b_transposed : {false, true}) {
      std::vector<float> d(512, -1.0f);
      launch(product<T>, {.threads = 64, .shared_bytes = 64 * kLd * sizeof(T)}, nullptr, a.data(),
             a_transposed, b.data(), b_transposed, d.data());
      for (int w = 0; w < 2; ++w) {
        for (int i = 0; i < 16; ++i) {
          for (int j = 0; j < 16; ++j) {
            float sum = 1;
            for (int q = 0; q < 16; ++q) {
              sum += static_cast<float>(a[w * 256 + (a_transposed ? q * 16 + i : i * 16 + q)]) *
                     static_cast<float>(b[w * 256 + (b_transposed ? j * 16 + q : q * 16 + j)]);
            }
            ASSERT_EQ(d[w * 256 + i * 16 + j], sum) << a_transposed << b_transposed;
          }
        }
      }
    }
  }
}

TEST(MatrixFragment, MultipliesFloat16) { check_products<Float16>(); }
TEST(MatrixFragment, MultipliesBFloat16) { check_products<BFloat16>(); }

TEST(MatrixFragment, SumsBecomeAFactor) {
  const auto a = numbers<Float16>(256, 5), b = numbers<Float16>(256, 3),
             c = numbers<Float16>(256, 2);
  std::vector<float> d(256), rows(16), ab(256);
  launch(chain, {.threads = 32, .shared_bytes = 48 * kLd * sizeof(Float16)}, nullptr, a.data(),
         b.data(), c.data(), d.data(), rows.data());
  for (int i = 0; i < 16; ++i) {
    float row = 0;
    for (int j = 0; j < 16; ++j) {
      for (int q = 0; q < 16; ++q) ab[i * 16 + j] += float{a[i * 16 + q]} * float{b[q * 16 + j]};
      row += ab[i * 16 + j];
    }
    EXPECT_EQ(rows[i], row);
    for (int j = 0; j < 16; ++j) {
      float sum = 0;
      for (int q = 0; q < 16; ++q) sum += ab[i * 16 + q] * float{c[q * 16 + j]};
      ASSERT_EQ(d[i * 16 + j], sum);
    }
  }
}

}  // namespace
}  // namespace ortrain::gpu
