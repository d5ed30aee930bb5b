// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/passes/pass.h"

namespace ortrain {

// Attention whose boolean mask hides from each query the keys behind it, whatever the sizes: it is
// causal, and only what else the mask says remains one. A mask of queries times keys goes away, and
// kernels leave out the tiles that nobody sees. Of a mask of which nothing but one smaller value, such
// as which keys are padding, hides anything, that value remains.
Pass causal_masks();

}  // namespace ortrain
