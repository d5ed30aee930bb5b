// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/storage.h"

#include "ortrain/base/error.h"

namespace ortrain::cpu {

Storage storage_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return Storage::kF32;
    case DType::f64:
      return Storage::kF64;
    case DType::bf16:
      return Storage::kBF16;
    case DType::f16:
      return Storage::kF16;
    default:
      throw DTypeError(str("no kernel for element type ", name_of(dtype)));
  }
}

}  // namespace ortrain::cpu
