// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/plan/memory_planner.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

using Exact = __int128;

TEST(PlanMemory, BuffersLieApartInExactNumbersOrAreRefused) {
  std::mt19937_64 draw(7);
  int planned = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<BufferLifetime> buffers(1 + draw() % 12);
    const int widest = draw() % 2 == 0 ? 47 : 8 + static_cast<int>(draw() % 40);
    Exact all = 0;
    for (BufferLifetime& buffer : buffers) {
      const int bits = draw() % 2 == 0 ? widest : 1 + static_cast<int>(draw() % widest);
      const int64_t bytes = static_cast<int64_t>(draw() >> (64 - bits));
      buffer.bytes = bytes_of<char>(std::min(bytes, kMostBytes));
      buffer.first_step = static_cast<int>(draw() % 8);
      buffer.last_step = buffer.first_step + static_cast<int>(draw() % 4);
      all += buffer.bytes.value() + kArenaAlignment;
    }
    MemoryLayout layout;
    try {
      layout = plan_memory(buffers);
      ++planned;
    } catch (const ShapeError&) {
      EXPECT_TRUE(all > kMostBytes);
      ++refused;
      continue;
    }
    for (size_t i = 0; i < buffers.size(); ++i) {
      const Exact begin = layout.offsets[i], end = begin + buffers[i].bytes.value();
      EXPECT_EQ(layout.offsets[i] % kArenaAlignment, 0u);
      EXPECT_TRUE(end <= static_cast<Exact>(layout.total_bytes));
      for (size_t j = 0; j < i; ++j) {
        const bool together = buffers[i].first_step <= buffers[j].last_step &&
                              buffers[j].first_step <= buffers[i].last_step;
        const Exact other = layout.offsets[j], other_end = other + buffers[j].bytes.value();
        const bool apart = end <= other || other_end <= begin;
        const bool empty = begin == end || other == other_end;
        EXPECT_TRUE(!together || apart || empty);
      }
    }
    EXPECT_LE(layout.lower_bound, layout.total_bytes);
  }
  EXPECT_GT(planned, 5000);
  EXPECT_GT(refused, 500);
}

}  // namespace
}  // namespace ortrain
