// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/passes/pass.h"

namespace ortrain {

// Common subexpressions: of nodes with equal operator, attributes and inputs the first stays.
// Across the phases only small integer results are shared, so that what a gradient rule computes
// again to save memory is not kept alive instead. Operators that draw random numbers stay.
//
//   Cast(w) ─► a, Cast(w) ─► b     =>     Cast(w) ─► a, b
Pass merge_common();

}  // namespace ortrain
