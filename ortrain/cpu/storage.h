// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ortrain/base/dtype.h"

namespace ortrain::cpu {

// How an operand lies in memory; 16-bit formats are widened to float before any arithmetic.
enum class Storage { kF32, kF64, kBF16, kF16 };

// Of a float type; throws DTypeError for others.
Storage storage_of(DType dtype);

constexpr int64_t storage_size(Storage storage) {
  return storage == Storage::kF64 ? 8 : storage == Storage::kF32 ? 4 : 2;
}

// out[i] = float(in[i]). `storage` is a 16-bit format.
void widen(Storage storage, const uint16_t* in, float* out, int64_t n);

// out[i] = in[i] rounded to nearest even; NaN stays NaN. `storage` is a 16-bit format.
void narrow(Storage storage, const float* in, uint16_t* out, int64_t n);

}  // namespace ortrain::cpu
