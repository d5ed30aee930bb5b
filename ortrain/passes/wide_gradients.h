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
// differ from PyTorch's by not being rounded in between: they are closer to those in float32.
//
// Of what comes from the gradients that a backward is given alone: what a forward rounds, it meant
// to, also where it is computed again in the backward. Of bfloat16 alone, whose range is float32's:
// that a gradient in float16 overflows is what scalers of losses look for. Left out under a budget
// of memory.
Pass wide_gradients();

}  // namespace ortrain
