// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include "ortrain/cpu/simd/targets.h"
// targets.h first.
#include "hwy/targets.h"

namespace ortrain::cpu {

// Runs `body` once per SIMD target that this machine supports and the kernels were built for.
template <class Body>
void for_each_target(Body body) {
  const int64_t all = hwy::SupportedTargets() & HWY_TARGETS;
  for (int64_t left = all; left != 0; left &= left - 1) {
    const int64_t target = left & ~(left - 1);
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(hwy::TargetName(target));
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace ortrain::cpu
