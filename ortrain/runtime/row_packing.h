// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ortrain/base/dim.h"
#include "ortrain/base/dtype.h"

namespace ortrain {

// An attention mask in host memory, [batch or 1, 1, length or 1, length]. Booleans are true where a
// key is seen; floats are added to the scores, 0 where it is.
struct MaskView {
  const void* data = nullptr;
  DType dtype = DType::boolean;
  Dims dims;
};

// The rows of [batch, length, ...] values that a call needs, sequence after sequence.
struct RowPacking {
  // Queries see the keys up to themselves, not all of their sequence.
  bool causal = false;
  // Per kept row: its number among batch * length, its position, its sequence. Filled up to a
  // multiple of a granule with copies of the first, so that few different counts need a plan.
  std::vector<int64_t> positions, columns, sequences;
  // The kept rows of sequence b are [offsets[b], offsets[b + 1]).
  std::vector<int64_t> offsets;
  // Per entry of `picked`: where that position of each sequence stands among the kept rows.
  std::vector<std::vector<int64_t>> picked;
};

// Keeps the rows that some query sees as a key, and the positions `picked` of every sequence.
// Nullopt where kept queries do not see all kept keys of their sequence, or all up to themselves;
// where masks differ, have other shapes, add other numbers than 0 and minus a huge one; and where
// nearly all rows are kept, so that nothing is gained. Throws ShapeError for more rows than there
// can be.
std::optional<RowPacking> pack_rows(std::span<const MaskView> masks, int64_t batch, int64_t length,
                                    std::span<const int64_t> picked);

}  // namespace ortrain
