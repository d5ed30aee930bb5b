// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <limits>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/base/philox.h"
#include "ortrain/gpu/device_code.h"

// What the GPU's kernels for attention know about one node, and what they compute for one element
// of the scores.
namespace ortrain::gpu {

// Distances in elements; the elements of one head's row are contiguous.
struct AttentionStrides {
  int64_t batch, head, row;
  ORTRAIN_HOST_DEVICE int64_t at(int64_t b, int64_t h, int64_t i) const {
    return b * batch + h * head + i * row;
  }
};

// Added to the scores: floats of the type of q, or booleans (false = minus infinity). A stride of 0
// repeats.
struct AttentionMask {
  enum class Kind { none, boolean, floats };
  Kind kind = Kind::none;
  const void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0, col = 0;
  ORTRAIN_HOST_DEVICE int64_t at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return b * batch + h * head + i * row + j * col;
  }
};

// A problem as ortrain/cpu/attention.h describes it; addresses are the device's.
struct AttentionProblem {
  int64_t batch, heads, kv_heads, queries, keys;
  int head_dim, value_dim;
  AttentionStrides q_strides, k_strides, v_strides, out_strides;
  AttentionMask mask;
  double scale;
  bool causal;
  bool drops;  // dropout > 0
  uint32_t threshold;
  double kept;  // factor of what dropout keeps
  uint64_t stream;
  int64_t sequences;  // -1: one, of all rows

  const void *q, *k, *v;
  const int64_t* seed;
  const int64_t* offsets;  // sequences + 1
  void* out;
  void* logsumexp;  // [batch, heads, queries] of the compute type; may be null in the forward
  // Operands whose rows may be read in packs: of four elements, or of 16 bytes for matrix units.
  bool q_packs, k_packs, v_packs, out_packs;

  ORTRAIN_HOST_DEVICE int64_t group() const { return heads / kv_heads; }
  // Number of a query's row among all, which logsumexp and dropout go by.
  ORTRAIN_HOST_DEVICE int64_t row(int64_t b, int64_t h, int64_t i) const {
    return (b * heads + h) * queries + i;
  }
};

struct AttentionBackwardProblem {
  AttentionProblem forward;  // as it ran; out and logsumexp are read
  const void* dout;
  const void* delta;   // sum(dout out) per row, like logsumexp
  void *dq, *dk, *dv;  // null where they are not wanted
  // [batch, heads, queries, keys], the gradient of a mask that has an element for each score: made
  // beside dq by matrix units. Null: not wanted, or made apart.
  void* dmask;
  bool dout_packs, dq_packs, dk_packs, dv_packs;
};

// The rows of one sequence, or all rows. Keys and queries of a sequence are the same rows.
struct AttentionSpan {
  int64_t first, queries, keys;
};

// Tiles of `size` rows that cover every sequence: sequence n has those from offsets[n] / size + n
// on, at most one of which is too many. No prefix sum over lengths is needed for that.
inline int64_t attention_tiles(const AttentionProblem& p, int64_t rows, int64_t size) {
  return p.sequences < 0 ? (rows + size - 1) / size : rows / size + p.sequences;
}

ORTRAIN_DEVICE int64_t sequence_offset(const AttentionProblem& p, int64_t n) {
  const int64_t offset = p.offsets[n];
  return offset < 0 ? 0 : offset > p.queries ? p.queries : offset;
}

// Finds the sequence that `tile` belongs to and the tile's first row in it, which may be behind the
// sequence's end. Wrong offsets are reported elsewhere, and lead to no address out of bounds.
ORTRAIN_DEVICE AttentionSpan span_of_tile(const AttentionProblem& p, int64_t tile, int size,
                                          int64_t& start) {
  if (p.sequences < 0) {
    start = tile * size;
    return {0, p.queries, p.keys};
  }
  int64_t low = 0, high = p.sequences;  // the last n whose first tile is <= tile
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (sequence_offset(p, middle) / size + middle <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  if (p.sequences == 0) {
    start = 0;
    return {0, 0, 0};
  }
  const int64_t first = sequence_offset(p, low);
  const int64_t end = sequence_offset(p, low + 1);
  const int64_t rows = end > first ? end - first : 0;
  start = (tile - (first / size + low)) * size;
  if (start < 0) start = rows;
  return {first, rows, rows};
}

// Query i and key j of a span. `dot` is scaled.
struct AttentionElements {
  const AttentionProblem& p;
  int64_t b, h;
  AttentionSpan span;

  // Whether queries i, i + 1, ... see keys j, j + 1, ..., kEach of each: bit n * i_stride +
  // m * j_stride says it of i + n and j + m.
  template <int kEach>
  ORTRAIN_DEVICE unsigned visible(int64_t i, int64_t j, int i_stride, int j_stride) const {
    const int rows = up_to(span.queries - i, kEach);
    const int columns = up_to(span.keys - j, kEach);
    const int64_t diagonal = p.causal ? i + 1 - j : span.keys + kEach;
    unsigned bits = 0;
    ORTRAIN_UNROLL
    for (int n = 0; n < kEach; ++n) {
      const int seen = n < rows ? up_to(diagonal + n, columns) : 0;
      ORTRAIN_UNROLL
      for (int m = 0; m < kEach; ++m) {
        bits |= (m < seen ? 1u : 0u) << (n * i_stride + m * j_stride);
      }
    }
    if (p.mask.kind != AttentionMask::Kind::boolean) return bits;
    const bool* const sees = static_cast<const bool*>(p.mask.data) + p.mask.at(b, h, i, j);
    ORTRAIN_UNROLL
    for (int n = 0; n < kEach; ++n) {
      ORTRAIN_UNROLL
      for (int m = 0; m < kEach; ++m) {
        const unsigned bit = 1u << (n * i_stride + m * j_stride);
        if ((bits & bit) != 0 && !sees[n * p.mask.row + m * p.mask.col]) bits &= ~bit;
      }
    }
    return bits;
  }
  ORTRAIN_DEVICE static int up_to(int64_t value, int most) {
    return value < 0 ? 0 : value > most ? most : static_cast<int>(value);
  }
  template <class T>
  ORTRAIN_DEVICE ComputeType<T> added(int64_t i, int64_t j) const {
    if (p.mask.kind != AttentionMask::Kind::floats) return 0;
    return static_cast<ComputeType<T>>(static_cast<const T*>(p.mask.data)[p.mask.at(b, h, i, j)]);
  }
  // The block of draws of key j and those behind it, the first of which is a block's.
  ORTRAIN_DEVICE uint64_t draw(int64_t i, int64_t j) const {
    return static_cast<uint64_t>(p.row(b, h, span.first + i) * blocks_of_row(p.keys) +
                                 j / kHalvesOfBlock);
  }
};

// What dropout keeps; kHalvesOfBlock keys of a query come from one draw.
class AttentionDropout {
 public:
  ORTRAIN_DEVICE explicit AttentionDropout(const AttentionProblem& p)
      : threshold_(p.threshold),
        seed_(p.drops ? static_cast<uint64_t>(*p.seed) : 0),
        stream_(p.stream) {}

  // Bit n: whether number kHalvesOfBlock * block + n is kept.
  ORTRAIN_DEVICE unsigned draw(uint64_t block) const {
    const auto words = philox_halves(seed_, stream_, block);
    unsigned bits = 0;
    ORTRAIN_UNROLL
    for (int n = 0; n < kHalvesOfBlock / 2; ++n) {
      bits |= ((words[n] & 0xFFFFu) >= threshold_ ? 1u : 0u) << (2 * n);
      bits |= (words[n] >> 16 >= threshold_ ? 1u : 0u) << (2 * n + 1);
    }
    return bits;
  }

  // Whether queries i, i + 1, ... keep keys j, j + 1, ... of one draw: bits as
  // AttentionElements::visible has them. Only where dropout is on.
  template <int kEach>
  ORTRAIN_DEVICE unsigned kept(const AttentionElements& elements, int64_t i, int64_t j,
                               int i_stride, int j_stride) const {
    static_assert(kHalvesOfBlock % kEach == 0);
    unsigned bits = 0;
    // Rolled: a draw is long.
#pragma unroll 1
    for (int n = 0; n < kEach; ++n) {
      const unsigned row = draw(elements.draw(i + n, j)) >> (j % kHalvesOfBlock);
      ORTRAIN_UNROLL
      for (int m = 0; m < kEach; ++m) bits |= ((row >> m) & 1u) << (n * i_stride + m * j_stride);
    }
    return bits;
  }

 private:
  uint32_t threshold_;
  uint64_t seed_, stream_;
};

template <class T>
ORTRAIN_DEVICE const T* attention_row(const void* data, const AttentionStrides& strides, int64_t b,
                                      int64_t h, int64_t i) {
  return static_cast<const T*>(data) + strides.at(b, h, i);
}
template <class T>
ORTRAIN_DEVICE T* attention_row(void* data, const AttentionStrides& strides, int64_t b, int64_t h,
                                int64_t i) {
  return static_cast<T*>(data) + strides.at(b, h, i);
}

}  // namespace ortrain::gpu
