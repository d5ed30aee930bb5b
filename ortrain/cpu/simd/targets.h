// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Include before any hwy/ header. Kernels are built for AVX-512, AVX2 and the portable baseline;
// the SSE targets in between would only add compile time for processors older than 2013.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#endif
