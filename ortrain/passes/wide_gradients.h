// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/passes/pass.h"

namespace ortrain {

// Under autocast weights are float32 and their gradients are summed in float32, rounded to 16 bits,
// written, read, and cast back. Where a gradient is read by such a cast alone it is given as it was
// summed:
//
//   LinearWeightGrad(dy, x) ─ Cast float32      =>  WideLinearWeightGrad(dy, x)
//   Gemm(x, dy, transA = 1) ─ Cast float32      =>  WideLinearWeightGrad(x, dy)
//   ReduceSum(dy, axes)     ─ Cast float32      =>  WideReduceSum(dy, axes)
//
// through views and transposes in between. A third of the bytes and a launch for each. The results
// differ from PyTorch's by not being rounded in between: they are closer to those in float32. Nodes
// of the backward alone: what a forward rounds, it meant to.
Pass wide_gradients();

}  // namespace ortrain
