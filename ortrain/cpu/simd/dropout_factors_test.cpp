// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/simd/dropout_factors.h"

#include <gtest/gtest.h>

#include <vector>

#include "ortrain/base/philox.h"
#include "ortrain/cpu/simd/for_each_target.h"

namespace ortrain::cpu {
namespace {

TEST(DropoutFactors, EqualTheScalarDefinition) {
  const uint64_t seed = 0xFEDCBA9876543210;
  const uint64_t stream = 0x100000007;
  const uint32_t threshold = half_threshold(0.3);
  for_each_target([&] {
    for (int64_t begin : {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{3}, int64_t{4}, int64_t{255},
                          int64_t{7}, int64_t{34359738361}}) {  // crosses 2^32 blocks
      for (int64_t count : {0, 1, 3, 4, 7, 8, 9, 17, 64, 300, 1000}) {
        std::vector<float> factor(count + 1, -1.0f);
        dropout_factors(seed, stream, threshold, 1.25f, begin, begin + count, factor.data());
        for (int64_t i = 0; i < count; ++i) {
          const bool keep = philox_half(seed, stream, begin + i) >= threshold;
          ASSERT_EQ(factor[i], keep ? 1.25f : 0.0f) << begin << " + " << i;
        }
        EXPECT_EQ(factor[count], -1.0f);
      }
    }
  });
}

}  // namespace
}  // namespace ortrain::cpu
