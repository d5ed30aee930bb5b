// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ortrain/cpu/storage.h"

namespace ortrain::cpu {

enum class GemmBackend { kPacked, kOnednn };

// Which implementation multiplies matrices of this type and size.
GemmBackend gemm_backend_for(Storage storage, int64_t m, int64_t n, int64_t k);

// C[m, n] = alpha * op(A)[m, k] * op(B)[k, n] + beta * C + bias[n], all row-major; op transposes if
// asked to, lda, ldb, ldc are the distances of stored rows. beta = 0 does not read C; bias may be
// null. C must not overlap A or B. Accumulation in the type of C.
void gemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
          int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc,
          const float* bias = nullptr);
void gemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, double alpha,
          const double* a, int64_t lda, const double* b, int64_t ldb, double beta, double* c,
          int64_t ldc, const double* bias = nullptr);
// 16-bit storage of all operands (`storage` is kBF16 or kF16), float accumulation, one rounding.
void gemm(Storage storage, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
          const uint16_t* a, int64_t lda, const uint16_t* b, int64_t ldb, float beta, uint16_t* c,
          int64_t ldc, const uint16_t* bias = nullptr);

// Products of one shape at several places: product i reads A at a_offsets[i], and so on (elements).
// The offsets of C are distinct.
struct GemmBatch {
  int64_t count;
  const int64_t* a_offsets;
  const int64_t* b_offsets;
  const int64_t* c_offsets;
};

void gemm_batched(const GemmBatch& batch, bool trans_a, bool trans_b, int64_t m, int64_t n,
                  int64_t k, float alpha, const float* a, int64_t lda, const float* b, int64_t ldb,
                  float beta, float* c, int64_t ldc);
void gemm_batched(const GemmBatch& batch, bool trans_a, bool trans_b, int64_t m, int64_t n,
                  int64_t k, double alpha, const double* a, int64_t lda, const double* b,
                  int64_t ldb, double beta, double* c, int64_t ldc);
void gemm_batched(Storage storage, const GemmBatch& batch, bool trans_a, bool trans_b, int64_t m,
                  int64_t n, int64_t k, float alpha, const uint16_t* a, int64_t lda,
                  const uint16_t* b, int64_t ldb, float beta, uint16_t* c, int64_t ldc);

}  // namespace ortrain::cpu
