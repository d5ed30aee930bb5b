// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/passes/pass.h"

namespace ortrain {

// A matrix product that is only added to something of its own shape starts from that instead of
// from zero (beta = 1), in place where nobody else reads it:
//
//   LinearInputGrad(dy, w) ─► Add(dx) ─► sum     =>     LinearInputGrad(dy, w, dx) ─► sum
//
// Likewise LinearWeightGrad: the gradients of a shared weight are summed where they are produced.
Pass accumulate_products();

}  // namespace ortrain
