// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Include before any hwy/ header. Kernels are built for AVX-512, AVX2, NEON and the portable
// baseline: the SSE targets would only add compile time for processors older than 2013, and the
// kernels keep vectors in arrays, which the targets of unknown vector length do not allow.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif
