// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ortrain::cpu {

// Row operations of blocked attention, for the best SIMD target of this machine.
struct AttentionRows {
  // s += mask (may be null); returns the largest score.
  float (*mask_max)(float* s, const float* mask, int64_t n);
  // p = exp(s + mask - lse), then ds = p (dp factor - delta) over dp, and s = p factor. mask and
  // factor may be null.
  void (*gradient)(float* s, float* dp, const float* mask, const float* factor, float lse,
                   float delta, int64_t n);
};

AttentionRows attention_rows();

}  // namespace ortrain::cpu
