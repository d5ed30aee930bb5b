// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/plan/memory_planner.h"

#include <algorithm>
#include <numeric>

namespace ortrain {
namespace {

size_t round_up(ByteCount bytes) { return bytes.rounded_up(kArenaAlignment).value(); }

size_t liveness_lower_bound(const std::vector<BufferLifetime>& buffers) {
  int last = 0;
  for (const BufferLifetime& buffer : buffers) last = std::max(last, buffer.last_step);
  // What begins or ends at one step is alive there together, and has been placed within kMostBytes.
  std::vector<int64_t> change(static_cast<size_t>(last) + 2, 0);
  for (const BufferLifetime& buffer : buffers) {
    const int64_t bytes = static_cast<int64_t>(round_up(buffer.bytes));
    change[static_cast<size_t>(buffer.first_step)] += bytes;
    change[static_cast<size_t>(buffer.last_step) + 1] -= bytes;
  }
  int64_t alive = 0;
  int64_t most = 0;
  for (int64_t delta : change) {
    alive += delta;
    most = std::max(most, alive);
  }
  return static_cast<size_t>(most);
}

MemoryLayout place_in_order(const std::vector<BufferLifetime>& buffers,
                            const std::vector<size_t>& order) {
  struct Placed {
    size_t offset;
    size_t end;
    int first;
    int last;
  };
  MemoryLayout layout;
  layout.offsets.resize(buffers.size(), 0);
  std::vector<Placed> placed;  // sorted by offset
  placed.reserve(buffers.size());
  for (size_t index : order) {
    const BufferLifetime& buffer = buffers[index];
    const size_t bytes = round_up(buffer.bytes);
    if (bytes == 0) continue;
    // Walk the neighbours in time from low to high addresses, keeping the tightest gap.
    size_t cursor = 0;
    size_t best_offset = SIZE_MAX;
    size_t best_gap = SIZE_MAX;
    for (const Placed& other : placed) {
      if (other.last < buffer.first_step || other.first > buffer.last_step) continue;
      if (other.offset > cursor && other.offset - cursor >= bytes &&
          other.offset - cursor < best_gap) {
        best_gap = other.offset - cursor;
        best_offset = cursor;
      }
      cursor = std::max(cursor, other.end);
    }
    const size_t offset = best_offset == SIZE_MAX ? cursor : best_offset;
    layout.offsets[index] = offset;
    const size_t end = (bytes_of<char>(offset) + bytes_of<char>(bytes)).value();
    layout.total_bytes = std::max(layout.total_bytes, end);
    const Placed entry{offset, end, buffer.first_step, buffer.last_step};
    placed.insert(
        std::upper_bound(placed.begin(), placed.end(), entry,
                         [](const Placed& a, const Placed& b) { return a.offset < b.offset; }),
        entry);
  }
  return layout;
}

}  // namespace

MemoryLayout plan_memory(const std::vector<BufferLifetime>& buffers) {
  std::vector<size_t> by_size(buffers.size());
  std::iota(by_size.begin(), by_size.end(), 0);
  std::vector<size_t> by_start = by_size;
  std::stable_sort(by_size.begin(), by_size.end(),
                   [&](size_t a, size_t b) { return buffers[a].bytes > buffers[b].bytes; });
  std::stable_sort(by_start.begin(), by_start.end(), [&](size_t a, size_t b) {
    if (buffers[a].first_step != buffers[b].first_step) {
      return buffers[a].first_step < buffers[b].first_step;
    }
    return buffers[a].last_step > buffers[b].last_step;
  });
  MemoryLayout layout = place_in_order(buffers, by_size);
  layout.lower_bound = liveness_lower_bound(buffers);
  if (layout.total_bytes > layout.lower_bound) {
    MemoryLayout other = place_in_order(buffers, by_start);
    if (other.total_bytes < layout.total_bytes) {
      layout.total_bytes = other.total_bytes;
      layout.offsets = std::move(other.offsets);
    }
  }
  return layout;
}

}  // namespace ortrain
