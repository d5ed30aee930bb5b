// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/ir/graph.h"

namespace ortrain {

// Replaces every operator of domain "ortrain" by what it is in standard operators, for files that
// other programs read; the result may hold operators that the engine does not run. Throws
// UnsupportedError naming operator and layer where there is no such form.
void to_standard_operators(Graph& graph);

}  // namespace ortrain
