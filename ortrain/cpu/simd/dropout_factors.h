// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ortrain::cpu {

// factor[i - begin] = scale where element i of an attention's stream is kept, else 0, for
// begin <= i < end: where its half is `threshold` or more, see ortrain/base/philox.h.
void dropout_factors(uint64_t seed, uint64_t stream, uint32_t threshold, float scale,
                     int64_t begin, int64_t end, float* factor);

}  // namespace ortrain::cpu
