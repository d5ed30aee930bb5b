// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/strided_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>

namespace ortrain::cpu {
namespace {

// Copies element by element.
template <typename T>
void copy_slowly(const Dims& dims, const Dims& in_strides, const Dims& out_strides, const T* in,
                 T* out) {
  for (int64_t i = 0; i < num_elements(dims); ++i) {
    int64_t rest = i, from = 0, to = 0;
    for (size_t k = dims.size(); k-- > 0;) {
      from += rest % dims[k] * in_strides[k];
      to += rest % dims[k] * out_strides[k];
      rest /= dims[k];
    }
    out[to] = in[from];
  }
}

template <typename T>
void check_copy(Dims dims, Dims in_strides, Dims out_strides, int64_t in_offset,
                int64_t out_offset, size_t in_size, size_t out_size) {
  std::vector<T> in(in_size);
  for (size_t i = 0; i < in_size; ++i) in[i] = static_cast<T>(i * 7 + 3);
  std::vector<T> expected(out_size, T{1}), actual(out_size, T{1});
  copy_slowly(dims, in_strides, out_strides, in.data() + in_offset, expected.data() + out_offset);
  StridedCopy(sizeof(T), dims, in_strides, out_strides, in_offset, out_offset)
      .run(in.data(), actual.data());
  EXPECT_EQ(actual, expected) << dims_str(dims) << dims_str(in_strides) << dims_str(out_strides);
}

template <typename T>
class StridedCopyTest : public ::testing::Test {};
using Elements = ::testing::Types<uint8_t, uint16_t, uint32_t, uint64_t>;
TYPED_TEST_SUITE(StridedCopyTest, Elements);

TYPED_TEST(StridedCopyTest, EveryPermutation) {
  const std::vector<Dims> shapes = {{}, {7}, {1, 9}, {17, 33}, {3, 1, 5}, {2, 3, 4, 5}, {3, 0, 2}};
  for (const Dims& shape : shapes) {
    const Dims strides = strides_of(shape);
    std::vector<size_t> perm(shape.size());
    std::iota(perm.begin(), perm.end(), 0);
    do {
      Dims dims, in;
      for (size_t axis : perm) {
        dims.push_back(shape[axis]);
        in.push_back(strides[axis]);
      }
      const size_t size = static_cast<size_t>(num_elements(shape));
      check_copy<TypeParam>(dims, in, strides_of(dims), 0, 0, size, size);
    } while (std::next_permutation(perm.begin(), perm.end()));
  }
}

TYPED_TEST(StridedCopyTest, LargeTransposeRunsInParallel) {
  check_copy<TypeParam>({1000, 300}, {1, 1000}, {300, 1}, 0, 0, 300000, 300000);
  check_copy<TypeParam>({4, 300, 250}, {75000, 1, 300}, {75000, 250, 1}, 0, 0, 300000, 300000);
}

TYPED_TEST(StridedCopyTest, ExpandFlipAndHoles) {
  check_copy<TypeParam>({5, 9}, {0, 1}, {9, 1}, 0, 0, 9, 45);
  check_copy<TypeParam>({5, 9}, {1, 0}, {9, 1}, 0, 0, 5, 45);
  check_copy<TypeParam>({2, 3, 4}, {0, 1, 0}, {12, 4, 1}, 0, 0, 3, 24);
  check_copy<TypeParam>({4, 9}, {-9, -1}, {9, 1}, 35, 0, 36, 36);
  check_copy<TypeParam>({4, 3}, {9, 2}, {3, 1}, 1, 0, 36, 12);
  check_copy<TypeParam>({4, 3}, {3, 1}, {18, 2}, 0, 1, 12, 72);
  check_copy<TypeParam>({4, 3}, {3, 1}, {-18, -2}, 0, 71, 12, 72);
  check_copy<TypeParam>({70000}, {1}, {1}, 3, 5, 70003, 70005);
  check_copy<TypeParam>({70000}, {0}, {1}, 3, 0, 4, 70000);
}

TYPED_TEST(StridedCopyTest, Fill) {
  for (int64_t count : {0, 1, 7, 100000}) {
    std::vector<TypeParam> out(static_cast<size_t>(count) + 1, TypeParam{9});
    const TypeParam value = 5;
    fill_elements(out.data(), count, sizeof(TypeParam), &value);
    EXPECT_EQ(std::count(out.begin(), out.end(), value), count);
    EXPECT_EQ(out.back(), TypeParam{9});
  }
}

}  // namespace
}  // namespace ortrain::cpu
