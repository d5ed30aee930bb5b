// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/block_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
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

void request_arenas(BlockPool& pool, int count, size_t bytes) {
  for (int i = 0; i < count; ++i) pool.arena(bytes).reset();
}

// Training goes on in the arena of an evaluation that was larger.
TEST(BlockPool, PagesThatNobodyNeedsAnyMoreGoBack) {
  for (const size_t small : {size_t{1000}, 3 * kMiB, 16 * kMiB}) {
    const auto pool = BlockPool::create();
    pool->arena(400 * kMiB).reset();
    request_arenas(*pool, 2 * BlockPool::kWhile * 1024, small);
    EXPECT_LE(pool->stats().bytes_cached, std::max(20 * kMiB, small)) << small;
    const auto arena = pool->arena(small);
    ASSERT_GE(arena->bytes(), small);
    std::memset(arena->data(), 1, arena->bytes());
    const auto grown = pool->arena(100 * kMiB);
    std::memset(grown->data(), 2, grown->bytes());
    EXPECT_EQ(static_cast<const char*>(arena->data())[small - 1], 1);
  }
}

TEST(BlockPool, WhatIsNeededNowAndThenStays) {
  const auto pool = BlockPool::create();
  pool->arena(100 * kMiB).reset();
  const int64_t before = pool->stats().system_allocations;
  for (int i = 0; i < 10; ++i) {
    request_arenas(*pool, 10 * BlockPool::kWhile, 8 * kMiB);
    request_arenas(*pool, 100 * BlockPool::kWhile, 8 * 1024);
    pool->arena(100 * kMiB).reset();
  }
  EXPECT_EQ(pool->stats().system_allocations, before);
  EXPECT_EQ(pool->stats().bytes_cached, 100 * kMiB);
}

// One that is in use meanwhile is cut when it comes back; nothing is taken from whoever holds it.
TEST(BlockPool, AnArenaIsCutOnlyOnceItIsFree) {
  const auto pool = BlockPool::create();
  auto held = pool->arena(200 * kMiB);
  request_arenas(*pool, 100 * BlockPool::kWhile, 8 * kMiB);
  ASSERT_EQ(held->bytes(), 200 * kMiB);
  std::memset(held->data(), 1, held->bytes());
  held.reset();
  EXPECT_LE(pool->stats().bytes_cached, 20 * kMiB);
}

TEST(BlockPool, ArenasThatWereInUseAtOnceGoWhenOneIsEnough) {
  const auto pool = BlockPool::create();
  std::vector<std::shared_ptr<Block>> several;
  for (int i = 0; i < 5; ++i) several.push_back(pool->arena(10 * kMiB));
  several.clear();
  request_arenas(*pool, BlockPool::kWhile, 10 * kMiB);
  EXPECT_EQ(pool->stats().bytes_cached, 50 * kMiB);
  request_arenas(*pool, 2 * BlockPool::kWhile, 10 * kMiB);
  EXPECT_EQ(pool->stats().bytes_cached, 10 * kMiB);
}

TEST(BlockPool, TensorsOfALargeEvaluationGoBack) {
  const auto pool = BlockPool::create();
  pool->tensor(500 * kMiB).reset();
  for (int i = 0; i < 3 * BlockPool::kWhile; ++i) {
    pool->arena(8 * kMiB).reset();
    pool->tensor(10 * kMiB).reset();
  }
  EXPECT_LE(pool->stats().bytes_cached, (8 + 10 + 10 + 64) * kMiB);
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
