// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/block_pool.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

TEST(BlockPool, BlocksAreAlignedAndAsLongAsAskedFor) {
  const auto pool = BlockPool::create();
  for (const size_t bytes : {size_t{1}, size_t{300}, size_t{5000}, 3 * kMiB, 5 * kMiB + 1}) {
    for (const auto& block : {pool->arena(bytes), pool->tensor(bytes)}) {
      EXPECT_GE(block->bytes(), bytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(block->data()) % 64, 0u);
      std::memset(block->data(), 1, block->bytes());
    }
  }
  EXPECT_EQ(pool->stats().bytes_in_use, 0u);
}

TEST(BlockPool, AFreedBlockServesAgain) {
  const auto pool = BlockPool::create();
  for (const size_t bytes : {size_t{1000}, 8 * kMiB}) {
    pool->trim();
    const int64_t before = pool->stats().system_allocations;
    void* const first = pool->arena(bytes)->data();
    EXPECT_EQ(pool->arena(bytes)->data(), first);
    EXPECT_EQ(pool->arena(bytes / 2)->data(), first);
    EXPECT_EQ(pool->stats().system_allocations, before + 1);
  }
}

// Pages keep what was written to them while they move: they are not handed out anew.
TEST(BlockPool, ALargeArenaGrowsKeepingItsPages) {
  const auto pool = BlockPool::create();
  {
    const auto small = pool->arena(8 * kMiB);
    std::memset(small->data(), 7, small->bytes());
  }
  const auto grown = pool->arena(20 * kMiB);
  const char* const data = static_cast<const char*>(grown->data());
  EXPECT_EQ(grown->bytes(), 20 * kMiB);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % (2 * kMiB), 0u);
  EXPECT_EQ(data[0], 7);
  EXPECT_EQ(data[8 * kMiB - 1], 7);
  EXPECT_EQ(data[8 * kMiB], 0);
  std::memset(grown->data(), 1, grown->bytes());
  EXPECT_EQ(pool->stats().bytes_in_use, 20 * kMiB);
  EXPECT_EQ(pool->stats().bytes_cached, 0u);
}

TEST(BlockPool, ArenasInUseDoNotMove) {
  const auto pool = BlockPool::create();
  const auto used = pool->arena(8 * kMiB);
  std::memset(used->data(), 3, used->bytes());
  const auto other = pool->arena(16 * kMiB);
  EXPECT_NE(used->data(), other->data());
  std::memset(other->data(), 5, other->bytes());
  EXPECT_EQ(static_cast<const char*>(used->data())[8 * kMiB - 1], 3);
}

// A small arena lies in malloc's memory and is replaced, not grown.
TEST(BlockPool, ASmallArenaIsReplacedByALargeOne) {
  const auto pool = BlockPool::create();
  pool->arena(kMiB).reset();
  const auto large = pool->arena(8 * kMiB);
  std::memset(large->data(), 1, large->bytes());
  EXPECT_EQ(pool->stats().bytes_cached, 0u);
}

// Outputs of another shape do not drive out the gradients that the next backward wants.
TEST(BlockPool, WhatWasInUseAtOnceStaysCached) {
  const auto pool = BlockPool::create();
  std::vector<std::shared_ptr<Block>> gradients;
  for (int i = 0; i < 20; ++i) gradients.push_back(pool->tensor(10 * kMiB));
  gradients.clear();
  const auto output = pool->tensor(30 * kMiB);
  const int64_t before = pool->stats().system_allocations;
  for (int i = 0; i < 20; ++i) gradients.push_back(pool->tensor(10 * kMiB));
  EXPECT_EQ(pool->stats().system_allocations, before);
}

TEST(BlockPool, TheCacheIsBoundedByWhatWasInUseAtOnce) {
  const auto pool = BlockPool::create();
  for (size_t size = 10; size < 1000; size += size / 2) pool->tensor(size * kMiB).reset();
  const BlockPool::Stats stats = pool->stats();
  EXPECT_LE(stats.bytes_cached, (1000 + 64) * kMiB);
}

TEST(BlockPool, TrimGivesUnusedBlocksBack) {
  const auto pool = BlockPool::create();
  pool->arena(8 * kMiB).reset();
  pool->tensor(8 * kMiB).reset();
  EXPECT_EQ(pool->stats().bytes_cached, 16 * kMiB);
  pool->trim();
  EXPECT_EQ(pool->stats().bytes_cached, 0u);
}

TEST(BlockPool, TooMuchMemoryIsRefusedWithItsSize) {
  const auto pool = BlockPool::create();
  pool->arena(8 * kMiB).reset();
  for (const bool is_arena : {true, false}) {
    try {
      const size_t bytes = size_t{1} << 60;
      is_arena ? pool->arena(bytes) : pool->tensor(bytes);
      FAIL() << "not refused";
    } catch (const OutOfMemoryError& error) {
      EXPECT_NE(std::string(error.what()).find("1152921504606846976"), std::string::npos);
    }
  }
  EXPECT_EQ(pool->stats().bytes_in_use, 0u);
}

}  // namespace
}  // namespace ortrain
