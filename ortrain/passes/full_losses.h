// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/passes/pass.h"

namespace ortrain {

// CrossEntropy of 16-bit logits that were cast to float for it alone reads them as they are, and
// computes in float what it did before: its loss stays a float. Neither the logits nor their
// gradient are there in float any more. In front of autodiff, so that the gradient is rounded once,
// as the cast's own would be.
Pass full_losses();

}  // namespace ortrain
