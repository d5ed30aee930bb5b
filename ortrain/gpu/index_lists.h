// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "ortrain/base/byte_count.h"
#include "ortrain/base/dtype.h"
#include "ortrain/gpu/launch.h"

// Many positions that point to few or many targets, for what adds up or overwrites by index.
// Results depend on the indices alone, never on which thread came first.
namespace ortrain::gpu {

// Where a kernel puts what position `i` points to; a target of -1 is none. Positions and targets
// are below 2^31.
struct TargetSink {
  int32_t* targets = nullptr;  // per position
  int32_t* counts = nullptr;   // per target: how many point to it; or the last one that does
  bool last = false;

  ORTRAIN_DEVICE void put(int64_t i, int64_t target) const {
    targets[i] = static_cast<int32_t>(target);
    if (target < 0) return;
    if (last) {
      atomic_max(counts + target, static_cast<int32_t>(i));
    } else {
      atomic_add(counts + target, 1);
    }
  }
};

// For each target the last position that points to it, -1 for none.
class LastPositions {
 public:
  LastPositions() = default;
  LastPositions(int64_t positions, int64_t targets) : positions_(positions), targets_(targets) {}
  ByteCount workspace_bytes() const {
    return bytes_of<int32_t>(positions_) + bytes_of<int32_t>(targets_);
  }
  TargetSink begin(void* workspace, void* stream) const;

 private:
  int64_t positions_ = 0, targets_ = 0;
};

enum class Reduction { none, add, mul, max, min };

// updates [outer, positions, inner], base and out [outer, targets, inner].
struct ListShape {
  int64_t outer = 1, positions = 0, targets = 0, inner = 1;
};

// For each target the positions that point to it, in ascending order.
struct IndexLists {
  const int32_t* starts = nullptr;  // targets + 1
  const int32_t* positions = nullptr;
  const int32_t* targets = nullptr;  // per position
};

// out = base joined with all updates whose positions are in the lists. `pieces`: of as many bytes
// as piece_bytes() says, which are none for few positions.
void apply_lists(DType dtype, const IndexLists& lists, const ListShape& shape, Reduction reduction,
                 const void* base, const void* updates, void* out, void* pieces, void* stream);
ByteCount piece_bytes(DType dtype, const ListShape& shape);

// out = base joined by a reduction with all updates that point there, in float for 16-bit types:
// for each target in the order of positions, and in parts that sizes alone give.
class JoinByIndex {
 public:
  JoinByIndex(DType dtype, const ListShape& shape) : dtype_(dtype), shape_(shape) {}
  // What Kernel::why_not says.
  static std::optional<std::string> refusal(int64_t positions, int64_t targets);

  ByteCount workspace_bytes() const;
  // First this, then a kernel that calls put() for every position, then finish().
  TargetSink begin(void* workspace, void* stream) const;
  // base null: zeros (reduction add). base may be out.
  void finish(Reduction reduction, const void* base, const void* updates, void* out,
              void* workspace, void* stream) const;

 private:
  DType dtype_;
  ListShape shape_;
};

// out[targets of i] = updates[i] for the last i of each target; outer is 1.
void apply_last(size_t element_size, const TargetSink& sink, const ListShape& shape,
                const void* updates, void* out, void* stream);

}  // namespace ortrain::gpu
