// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/base/dtype.h"
#include "ortrain/cpu/gemm.h"

namespace ortrain::cpu {

// gemm and gemm_batched (gemm.h) for float operands whose type is known at run time only. Offsets
// and distances count elements.
void gemm_any(DType dtype, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k,
              double alpha, const void* a, int64_t lda, const void* b, int64_t ldb, double beta,
              void* c, int64_t ldc, const void* bias = nullptr);
void gemm_any_batched(DType dtype, const GemmBatch& batch, bool trans_a, bool trans_b, int64_t m,
                      int64_t n, int64_t k, double alpha, const void* a, int64_t lda, const void* b,
                      int64_t ldb, double beta, void* c, int64_t ldc);

}  // namespace ortrain::cpu
