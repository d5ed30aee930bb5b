// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/gemm_any.h"

namespace ortrain::cpu {

void gemm_any(DType dtype, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k,
              double alpha, const void* a, int64_t lda, const void* b, int64_t ldb, double beta,
              void* c, int64_t ldc, const void* bias) {
  const Storage storage = storage_of(dtype);
  if (storage == Storage::kF32) {
    gemm(trans_a, trans_b, m, n, k, static_cast<float>(alpha), static_cast<const float*>(a), lda,
         static_cast<const float*>(b), ldb, static_cast<float>(beta), static_cast<float*>(c), ldc,
         static_cast<const float*>(bias));
  } else if (storage == Storage::kF64) {
    gemm(trans_a, trans_b, m, n, k, alpha, static_cast<const double*>(a), lda,
         static_cast<const double*>(b), ldb, beta, static_cast<double*>(c), ldc,
         static_cast<const double*>(bias));
  } else {
    gemm(storage, trans_a, trans_b, m, n, k, static_cast<float>(alpha),
         static_cast<const uint16_t*>(a), lda, static_cast<const uint16_t*>(b), ldb,
         static_cast<float>(beta), static_cast<uint16_t*>(c), ldc,
         static_cast<const uint16_t*>(bias));
  }
}

void gemm_any_batched(DType dtype, const GemmBatch& batch, bool trans_a, bool trans_b, int64_t m,
                      int64_t n, int64_t k, double alpha, const void* a, int64_t lda, const void* b,
                      int64_t ldb, double beta, void* c, int64_t ldc) {
  const Storage storage = storage_of(dtype);
  if (storage == Storage::kF32) {
    gemm_batched(batch, trans_a, trans_b, m, n, k, static_cast<float>(alpha),
                 static_cast<const float*>(a), lda, static_cast<const float*>(b), ldb,
                 static_cast<float>(beta), static_cast<float*>(c), ldc);
  } else if (storage == Storage::kF64) {
    gemm_batched(batch, trans_a, trans_b, m, n, k, alpha, static_cast<const double*>(a), lda,
                 static_cast<const double*>(b), ldb, beta, static_cast<double*>(c), ldc);
  } else {
    gemm_batched(storage, batch, trans_a, trans_b, m, n, k, static_cast<float>(alpha),
                 static_cast<const uint16_t*>(a), lda, static_cast<const uint16_t*>(b), ldb,
                 static_cast<float>(beta), static_cast<uint16_t*>(c), ldc);
  }
}

}  // namespace ortrain::cpu
