// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/gpu/matrix_fragment.h"
#include "ortrain/ops/attention/attention_device.h"

namespace ortrain::gpu {

// What dropout keeps of kN tiles of 16 queries times 16 keys that lie side by side: queries are the
// rows of their accumulators, or keys. A draw of Philox gives eight keys of a query. All lanes of
// the warp take part, each of which draws once per tile, and gets from others what it has not.
template <bool kKeysAreRows, int kN>
class FragmentDraws {
 public:
  // Without dropout: everything.
  ORTRAIN_DEVICE FragmentDraws() : bits_(~0u) {}
  // Of queries and keys from these on; keys by sixteen.
  ORTRAIN_DEVICE FragmentDraws(const AttentionDropout& dropout, const AttentionElements& elements,
                               int query, int key)
      : bits_(0) {
#pragma unroll 2
    for (int n = 0; n < kN; ++n) {
      const unsigned tile = draw_tile(dropout, elements, query + (kKeysAreRows ? 16 * n : 0),
                                      key + (kKeysAreRows ? 0 : 16 * n));
      bits_ = bits_ >> kTileStep | (tile & kTileBits) << (kTileStep * (kMostTiles - 1));
    }
  }

  // Whether element e of the accumulator of tile n is kept.
  ORTRAIN_DEVICE bool keeps(int n, int e) const {
    return (bits_ >> (kTileStep * (kMostTiles - kN + n) + place(e))) & 1u;
  }

 private:
  static constexpr int kMostTiles = 4;
  static_assert(kN <= kMostTiles);

#if defined(__HIPCC__)
  // 4 bits for each tile, one per element.
  static constexpr int kTileStep = Accumulator::kElements;
  static constexpr unsigned kTileBits = 0xf;
  ORTRAIN_DEVICE static constexpr int place(int e) { return e; }
  // Each lane draws for a part of one query's keys.
  ORTRAIN_DEVICE static unsigned draw_tile(const AttentionDropout& dropout,
                                           const AttentionElements& elements, int query, int key) {
    constexpr int kShare = kWarpSize / 16;  // lanes per query
    constexpr int kKeys = 16 / kShare;
    const int own = key + lane() % kShare * kKeys;
    const unsigned drawn =
        dropout.draw(elements.draw(query + lane() / kShare, own)) >> (own % kHalvesOfBlock);
    unsigned bits = 0;
    ORTRAIN_UNROLL
    for (int e = 0; e < Accumulator::kElements; ++e) {
      const int row = Accumulator::row_of(e), column = Accumulator::column_of(e);
      const int q = kKeysAreRows ? column : row;
      const int k = kKeysAreRows ? row : column;
      bits |= (broadcast_lane(drawn, q * kShare + k / kKeys) >> (k % kKeys) & 1u) << place(e);
    }
    return bits;
  }
#else
  // A byte of each tile's 8 bits goes with a column of 8 keys, or with a query; tiles take two bits
  // of each byte.
  static constexpr int kTileStep = 2;
  static constexpr unsigned kTileBits = 0x03030303u;
  ORTRAIN_DEVICE static constexpr int place(int e) {
    return kKeysAreRows ? (e / 4 * 2 + e % 2) * 8 + Accumulator::row_slot(e)
                        : Accumulator::row_slot(e) * 16 + e / 4 * 8 + e % 2;
  }
  ORTRAIN_DEVICE static uint64_t block_of(const AttentionElements& elements, int query, int key) {
    return elements.draw(0, 0) +
           static_cast<uint64_t>(static_cast<uint32_t>(query)) *
               static_cast<uint32_t>(blocks_of_row(elements.p.keys)) +
           static_cast<uint32_t>(key / kHalvesOfBlock);
  }
  ORTRAIN_DEVICE static unsigned draw_tile(const AttentionDropout& dropout,
                                           const AttentionElements& elements, int query, int key) {
    const int row = lane() / 4, column = lane() % 4;
    if constexpr (kKeysAreRows) {
      // Lanes of the same column need the same four queries and both halves of the keys: each draws
      // for a query and a half.
      const int own = row % 4, half = row / 4;
      unsigned bits = dropout.draw(block_of(elements, query + own / 2 * 8 + column * 2 + own % 2,
                                            key + half * kHalvesOfBlock))
                      << (8 * own);
      bits |= exchange_xor(bits, 4);
      bits |= exchange_xor(bits, 8);
      const unsigned others = exchange_xor(bits, 16);
      const unsigned low = half == 0 ? bits : others, high = half == 0 ? others : bits;
      return (low >> row & 0x01010101u) | (high >> row & 0x01010101u) << 1;
    } else {
      // Lanes of the same row need two queries, eight rows apart: each draws for a query and half
      // of its keys.
      unsigned bits = dropout.draw(block_of(elements, query + row + column / 2 * 8,
                                            key + column % 2 * kHalvesOfBlock))
                      << (8 * column);
      bits |= exchange_xor(bits, 1);
      bits |= exchange_xor(bits, 2);
      return bits >> (2 * column);
    }
  }
#endif

  unsigned bits_;
};

}  // namespace ortrain::gpu
