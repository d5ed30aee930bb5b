// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ortrain/ir/node_spec.h"

namespace ortrain {

// One recurrent layer in one direction over sequences [steps, batch, ...].
struct Recurrence {
  int64_t steps = 0, batch = 0, input = 0, hidden = 0;
  bool reverse = false;

  // Position in the sequence of the k-th step that is computed.
  int64_t step(int64_t k) const { return reverse ? steps - 1 - k : k; }
  int64_t state() const { return batch * hidden; }
  // Steps that have anything to compute.
  int64_t steps_with_state() const { return state() == 0 ? 0 : steps; }
  int64_t rows() const { return steps * batch; }
};

// `x` and `h0` are the node's inputs of that name.
inline Recurrence recurrence_of(const NodeSpec& spec, size_t x, size_t h0) {
  const Dims& sequence = spec.input(x).dims;
  return {sequence[0], sequence[1], sequence[2], spec.input(h0).dims[1],
          spec.attrs().int_("reverse") != 0};
}

}  // namespace ortrain
