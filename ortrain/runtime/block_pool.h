// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace ortrain {

// A piece of memory, 64-byte aligned, contents undefined. It goes back to where it came from when
// the last reference is dropped.
class Block {
 public:
  // `data` belongs to whoever makes the block: a pool, or a device.
  Block(void* data, size_t bytes) : data_(data), bytes_(bytes) {}
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void* data_;
  size_t bytes_;
};

// Keeps freed blocks for reuse, so that steady training neither allocates nor faults pages. Arenas
// and tensors are kept apart: arenas are few and large, any that fits will do, and where none fits
// the largest, from 4 MiB on, grows, so that only the pages it gains are new; tensors want a close
// fit. What a while of arenas (kWhile) has not needed goes back to the system: the pages that a
// large evaluation took, behind which training goes on. Thread-safe.
class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  static std::shared_ptr<BlockPool> create();
  // The process-wide pool for host memory.
  static const std::shared_ptr<BlockPool>& host();
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // Throws OutOfMemoryError naming the size.
  std::shared_ptr<Block> arena(size_t bytes);
  std::shared_ptr<Block> tensor(size_t bytes);

  // Requests for arenas as long as the longest one, after which what is kept is looked at again;
  // shorter ones count as the share that they take, so that one training step beside many small
  // forwards keeps its pages. Of what was needed since the look before the last, nothing goes.
  static constexpr int kWhile = 64;

  // Gives all unused blocks back to the system.
  void trim();
  struct Stats {
    size_t bytes_in_use = 0;
    size_t bytes_cached = 0;
    int64_t system_allocations = 0;
  };
  Stats stats() const;

 private:
  struct Free {
    void* data;
    size_t bytes;
    uint64_t used_in;  // number of the while in which it was given back
  };
  // The largest of the values since the look before the last.
  struct Peak {
    size_t now = 0;
    size_t before = 0;
    size_t value() const { return now > before ? now : before; }
    void note(size_t value) { now = value > now ? value : now; }
    void pass_on(size_t start) { before = now, now = start; }
  };
  BlockPool() = default;
  std::shared_ptr<Block> acquire(std::vector<Free>& free_list, bool is_arena, size_t bytes);
  void release(bool is_arena, void* data, size_t bytes);
  // Drops cached blocks, oldest first, until at most `keep` bytes stay.
  void shrink(std::vector<Free>& free_list, size_t keep);
  // Takes the largest free arena and makes it `bytes` long; null if there is none, or no memory.
  void* grow_arena(size_t bytes);
  // Takes note of a request; at the end of a while gives back what was not needed.
  void note_arena(size_t bytes);
  void give_back_unneeded();
  // Returns a free arena's length once what is behind the longest that was needed is given back.
  size_t cut_arena(void* data, size_t bytes);

  mutable std::mutex mutex_;
  std::vector<Free> free_arenas_;   // oldest first
  std::vector<Free> free_tensors_;  // oldest first
  uint64_t while_ = 0;
  double requests_ = 0;  // in this while
  Peak longest_arena_;   // that was wanted
  Peak most_in_use_;
  Stats stats_;
};

}  // namespace ortrain
