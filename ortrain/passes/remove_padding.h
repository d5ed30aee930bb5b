// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "ortrain/ir/graph.h"

namespace ortrain {

// A graph whose layers compute only the rows of [batch, length, ...] values that a call needs:
//
//   ids[b, s] ─► layers on [b, s, d] ─► row 0 of each sequence ─► head
//   ids[b, s] ─► Gather(positions) ─► layers on [1, rows, d] ─► Gather(picked) ─► head
//
// Rows that no attention mask lets any query see, and that nothing behind the layers reads, go. How
// many remain is known when the masks are: `masks` computes them, pack_rows() in
// ortrain/runtime/row_packing.h makes the additional inputs of `packed` from them, or says that
// they are none that this graph can do.
struct PaddingRemoval {
  // An extent that a call's input number `input` has at `axis`.
  struct Extent {
    size_t input = 0;
    size_t axis = 0;
  };

  // The distinct masks as outputs. Only inputs that they need: `mask_inputs` are their positions
  // among the inputs of the original graph.
  Graph masks;
  std::vector<size_t> mask_inputs;
  // The inputs of the original graph, then with role `derived`: positions, columns, sequences
  // [rows], offsets [batch + 1], and one [batch] for each entry of `picked`.
  Graph packed;
  // Positions in a sequence that are always kept.
  std::vector<int64_t> picked;
  Extent batch, length;
};

// Nullopt where no layers stand between such values, or where all rows can be seen behind them.
// `causal`: the masks hide keys behind the query as well; pack_rows() tells.
std::optional<PaddingRemoval> remove_padding(const Graph& graph, bool causal);

}  // namespace ortrain
