// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/passes/pass.h"

namespace ortrain {

// The backward of a linear classifier and its loss becomes one node, which works on some labelled
// rows at a time and never holds the gradient of all logits:
//
//                     ┌─► LinearInputGrad(weight) ─► dx
//   CrossEntropyGrad ─┼─► LinearWeightGrad(x)     ─► dweight    =>   ClassifierLossGrad
//                     └─► ReduceSum(rows)         ─► dbias
Pass fuse_classifier_loss();

}  // namespace ortrain
