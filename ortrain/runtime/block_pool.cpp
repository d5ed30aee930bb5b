// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/runtime/block_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/error.h"

namespace ortrain {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t{2} << 20;
// Blocks from here on start at a huge page: fewer page faults and TLB misses on the first touch.
constexpr size_t kHugePageThreshold = size_t{4} << 20;
// Blocks in use and cached tensors may take what was in use at most, plus this.
constexpr size_t kCacheSlack = size_t{64} << 20;

[[noreturn]] void refuse(size_t bytes) {
  throw OutOfMemoryError(
      str("DefaultCPUAllocator: can't allocate memory: out of memory. Tried to allocate ", bytes,
          " bytes"));
}

size_t rounded(size_t bytes) {
  const size_t unit = bytes >= kHugePageThreshold ? kHugePage : size_t{4096};
  const size_t small_unit = bytes <= 4096 ? size_t{256} : unit;
  return std::max<size_t>((bytes + small_unit - 1) / small_unit * small_unit, 256);
}

// Pages of their own, which can grow in place of being copied, for large arenas; malloc's
// otherwise.
bool has_own_pages(bool is_arena, size_t bytes) { return is_arena && bytes >= kHugePageThreshold; }

// `bytes` of addresses that begin at a huge page; null if there are none.
char* map_pages(size_t bytes, int protection) {
  const size_t room = bytes + kHugePage;
  void* const mapped = mmap(nullptr, room, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* const begin = static_cast<char*>(mapped);
  const size_t lead = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  if (lead != 0) munmap(begin, lead);
  if (room - lead > bytes) munmap(begin + lead + bytes, room - lead - bytes);
  return begin + lead;
}

// Moves the pages to an aligned place with room for `bytes`; null, and nothing changed, if the
// system refuses.
void* grow_pages(void* data, size_t old_bytes, size_t bytes) {
  char* const place = map_pages(bytes, PROT_NONE);
  if (place == nullptr) return nullptr;
  void* const moved = mremap(data, old_bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, place);
  if (moved == MAP_FAILED) {
    munmap(place, bytes);
    return nullptr;
  }
  madvise(moved, bytes, MADV_HUGEPAGE);  // only a hint
  return moved;
}

void* allocate(bool is_arena, size_t bytes) {
  const bool huge = bytes >= kHugePageThreshold;
  void* const data = has_own_pages(is_arena, bytes)
                         ? map_pages(bytes, PROT_READ | PROT_WRITE)
                         : std::aligned_alloc(huge ? kHugePage : kAlignment, bytes);
  if (data != nullptr && huge) madvise(data, bytes, MADV_HUGEPAGE);  // only a hint
  return data;
}

void deallocate(bool is_arena, void* data, size_t bytes) {
  if (has_own_pages(is_arena, bytes)) {
    munmap(data, bytes);
  } else {
    std::free(data);
  }
}

}  // namespace

std::shared_ptr<BlockPool> BlockPool::create() {
  return std::shared_ptr<BlockPool>(new BlockPool());
}

const std::shared_ptr<BlockPool>& BlockPool::host() {
  // Never destroyed: tensors may outlive static destruction.
  static const auto* const pool = new std::shared_ptr<BlockPool>(create());
  return *pool;
}

BlockPool::~BlockPool() {
  shrink(free_arenas_, 0);
  shrink(free_tensors_, 0);
}

std::shared_ptr<Block> BlockPool::arena(size_t bytes) { return acquire(free_arenas_, true, bytes); }

std::shared_ptr<Block> BlockPool::tensor(size_t bytes) {
  return acquire(free_tensors_, false, bytes);
}

void BlockPool::shrink(std::vector<Free>& free_list, size_t keep) {
  size_t cached = 0;
  for (const Free& block : free_list) cached += block.bytes;
  size_t dropped = 0;
  while (dropped < free_list.size() && cached > keep) {
    cached -= free_list[dropped].bytes;
    stats_.bytes_cached -= free_list[dropped].bytes;
    deallocate(&free_list == &free_arenas_, free_list[dropped].data, free_list[dropped].bytes);
    ++dropped;
  }
  free_list.erase(free_list.begin(), free_list.begin() + static_cast<std::ptrdiff_t>(dropped));
}

void* BlockPool::grow_arena(size_t bytes) {
  const auto largest =
      std::max_element(free_arenas_.begin(), free_arenas_.end(),
                       [](const Free& a, const Free& b) { return a.bytes < b.bytes; });
  if (largest == free_arenas_.end() || !has_own_pages(true, largest->bytes)) return nullptr;
  void* const data = grow_pages(largest->data, largest->bytes, bytes);
  if (data == nullptr) return nullptr;
  stats_.bytes_cached -= largest->bytes;
  free_arenas_.erase(largest);
  return data;
}

std::shared_ptr<Block> BlockPool::acquire(std::vector<Free>& free_list, bool is_arena,
                                          size_t bytes) {
  if (bytes > static_cast<size_t>(kMostBytes)) refuse(bytes);
  const size_t wanted = rounded(bytes);
  const size_t most = is_arena ? SIZE_MAX : wanted + wanted / 4;
  void* data = nullptr;
  size_t size = wanted;
  {
    std::lock_guard lock(mutex_);
    if (is_arena) note_arena(wanted);
    size_t best = free_list.size();
    for (size_t i = 0; i < free_list.size(); ++i) {
      if (free_list[i].bytes < wanted || free_list[i].bytes > most) continue;
      if (best == free_list.size() || free_list[i].bytes <= free_list[best].bytes) best = i;
    }
    if (best < free_list.size()) {
      data = free_list[best].data;
      size = free_list[best].bytes;
      stats_.bytes_cached -= size;
      free_list.erase(free_list.begin() + static_cast<std::ptrdiff_t>(best));
    } else {
      if (is_arena) data = grow_arena(wanted);
      // Free arenas are all too small now: a larger one serves their purpose as well.
      // Tensors stay: the gradients of the last step are wanted again once backward runs.
      const size_t room = most_in_use_.value() + kCacheSlack;
      const size_t taken = stats_.bytes_in_use + wanted;
      shrink(free_list, is_arena || taken > room ? 0 : room - taken);
      if (data == nullptr) data = allocate(is_arena, wanted);
      if (data == nullptr) {
        shrink(free_arenas_, 0);
        shrink(free_tensors_, 0);
        data = allocate(is_arena, wanted);
      }
      if (data == nullptr) {
        refuse(wanted);
      }
      ++stats_.system_allocations;
    }
    stats_.bytes_in_use += size;
    most_in_use_.note(stats_.bytes_in_use);
  }
  auto* block = new Block(data, size);
  return std::shared_ptr<Block>(block, [pool = shared_from_this(), is_arena](Block* dropped) {
    pool->release(is_arena, dropped->data(), dropped->bytes());
    delete dropped;
  });
}

void BlockPool::release(bool is_arena, void* data, size_t bytes) {
  std::lock_guard lock(mutex_);
  stats_.bytes_in_use -= bytes;
  if (is_arena) bytes = cut_arena(data, bytes);
  stats_.bytes_cached += bytes;
  (is_arena ? free_arenas_ : free_tensors_).push_back({data, bytes, while_});
}

void BlockPool::note_arena(size_t bytes) {
  longest_arena_.note(bytes);
  constexpr double kLeast = 1.0 / 1024;
  const double share = static_cast<double>(bytes) / static_cast<double>(longest_arena_.value());
  requests_ += std::max(share, kLeast);
  if (requests_ < kWhile) return;
  give_back_unneeded();
  requests_ = 0;
  ++while_;
  longest_arena_.pass_on(0);
  most_in_use_.pass_on(stats_.bytes_in_use);
}

void BlockPool::give_back_unneeded() {
  std::vector<Free> kept;
  for (Free& block : free_arenas_) {
    stats_.bytes_cached -= block.bytes;
    if (block.used_in + 1 < while_) {
      deallocate(true, block.data, block.bytes);
      continue;
    }
    block.bytes = cut_arena(block.data, block.bytes);
    stats_.bytes_cached += block.bytes;
    kept.push_back(block);
  }
  free_arenas_ = std::move(kept);
  const size_t room = most_in_use_.value() + kCacheSlack;
  shrink(free_tensors_, room > stats_.bytes_in_use ? room - stats_.bytes_in_use : 0);
}

size_t BlockPool::cut_arena(void* data, size_t bytes) {
  if (!has_own_pages(true, bytes)) return bytes;
  const size_t needed = longest_arena_.value();
  const size_t kept = std::max(rounded(needed + needed / 4), kHugePageThreshold);
  if (kept >= bytes || munmap(static_cast<char*>(data) + kept, bytes - kept) != 0) return bytes;
  return kept;
}

void BlockPool::trim() {
  std::lock_guard lock(mutex_);
  shrink(free_arenas_, 0);
  shrink(free_tensors_, 0);
  most_in_use_ = {stats_.bytes_in_use, 0};
}

BlockPool::Stats BlockPool::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace ortrain
