// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ortrain/cpu/storage.h"

namespace ortrain::cpu {

// C[m, n] = alpha * op(A)[m, k] * op(B)[k, n] + beta * C + bias[n], row-major; T is float or
// double. 16-bit operands are widened while they are packed. beta = 0 does not read C.
template <class T>
struct PackedGemm {
  bool trans_a, trans_b;
  int64_t m, n, k;
  T alpha;
  const void* a;
  Storage a_storage;
  int64_t lda;
  const void* b;
  Storage b_storage;
  int64_t ldb;
  T beta;
  T* c;
  int64_t ldc;
  const T* bias;  // or null
};

// Own GEMM: panels packed once per block of depth, then tiles of C handed to the threads. Every
// element of C is summed in the same order whatever the number of threads.
void gemm_packed(const PackedGemm<float>& gemm);
void gemm_packed(const PackedGemm<double>& gemm);

}  // namespace ortrain::cpu
