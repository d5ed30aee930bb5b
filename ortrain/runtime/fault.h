// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ortrain {

enum class FaultKind : int32_t {
  being_written = -1,
  none,
  index,
  label,
  element,
  division,
  shape,
  group_end,  // `high` is allowed too
  offset,     // as well
  range,      // of BinCount
};

// The first thing that a kernel found wrong with the values it got. A kernel on a device cannot
// throw: it writes this, goes on with a value that does no harm, and the run throws as soon as the
// host looks. Until then the steps of optimizers change nothing.
struct Fault {
  FaultKind kind = FaultKind::none;
  uint32_t step = 0;     // its number in the process, see StepNumbers
  int64_t value = 0;     // what was found
  int64_t position = 0;  // where, counted in elements of its tensor
  int64_t low = 0;       // allowed: low <= value < high
  int64_t high = 0;
  int64_t axis = -1;  // `element`: of the tensor that is indexed; -1 is not said
};

}  // namespace ortrain
