// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/gemm.h"

#include <algorithm>
#include <initializer_list>
#include <limits>

#include "ortrain/cpu/gemm_packed.h"
#include "ortrain/cpu/onednn.h"
#include "ortrain/cpu/scratch.h"
#include "ortrain/cpu/threads.h"

namespace ortrain::cpu {
namespace {

// A block of a 16-bit C, held in float while it is summed.
constexpr int64_t kHalfRows = 512;
constexpr int64_t kHalfCols = 2048;

// May be more than int64 has.
double multiplications(int64_t m, int64_t n, int64_t k) {
  return static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
}

// Runs product(i) for each product of a batch: one per thread where there are enough of them or
// each is too small to share.
template <class Product>
void run_batch(int64_t count, double work, Product product) {
  constexpr double kSharedWork = 2e6;
  const int64_t threads = thread_count();
  if (threads > 1 && (count >= 2 * threads || (work < kSharedWork && count >= 2))) {
    constexpr double kGrainWork = 1e5;
    const auto grain = static_cast<int64_t>(std::max(1.0, kGrainWork / std::max(work, 1.0)));
    parallel_for(count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) product(i);
    });
    return;
  }
  for (int64_t i = 0; i < count; ++i) product(i);
}

// Of a 16-bit format.
OrtrainOnednnType onednn_type(Storage storage) {
  return storage == Storage::kBF16 ? kOrtrainBF16 : kOrtrainF16;
}

void run_onednn(OrtrainOnednnType type, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k,
                float alpha, const void* a, int64_t lda, const void* b, int64_t ldb, float beta,
                void* c, int64_t ldc, const void* bias) {
  const OrtrainOnednnGemm arguments{type, trans_a, trans_b, m,    n, k,   alpha, a,
                                    lda,  b,       ldb,     beta, c, ldc, bias};
  check_onednn(onednn()->gemm(&arguments), "gemm");
}

// oneDNN 3.2 keeps extents, and bytes from row to row, in int.
bool fits_onednn(size_t size, std::initializer_list<int64_t> extents) {
  const int64_t most = std::numeric_limits<int32_t>::max() / static_cast<int64_t>(size);
  return std::ranges::all_of(extents, [&](int64_t extent) { return extent <= most; });
}

}  // namespace

GemmBackend gemm_backend_for(Storage storage, int64_t m, int64_t n, int64_t k) {
  if (storage == Storage::kF64) return GemmBackend::kPacked;
  if (!fits_onednn(storage == Storage::kF32 ? sizeof(float) : sizeof(uint16_t), {m, n, k})) {
    return GemmBackend::kPacked;
  }
  if (storage != Storage::kF32) {
    // Without instructions for the type, widening while packing wins over the library.
    if (onednn() == nullptr || (onednn()->gemm_types >> onednn_type(storage) & 1u) == 0) {
      return GemmBackend::kPacked;
    }
  }

  // Measured on Zen 4 (AVX-512) against oneDNN 3.2: the library leads by 5 to 20 percent, except
  // where a call costs more than the product, and for few columns, which it packs.
  constexpr double kSmall = 32 * 32 * 32;
  if (multiplications(m, n, k) <= kSmall || n <= 4) return GemmBackend::kPacked;
  return onednn() != nullptr ? GemmBackend::kOnednn : GemmBackend::kPacked;
}

void gemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
          int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc,
          const float* bias) {
  if (gemm_backend_for(Storage::kF32, m, n, k) == GemmBackend::kOnednn &&
      fits_onednn(sizeof(float), {lda, ldb, ldc})) {
    run_onednn(kOrtrainF32, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, bias);
    return;
  }
  gemm_packed(PackedGemm<float>{trans_a, trans_b, m, n, k, alpha, a, Storage::kF32, lda, b,
                                Storage::kF32, ldb, beta, c, ldc, bias});
}

void gemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, double alpha,
          const double* a, int64_t lda, const double* b, int64_t ldb, double beta, double* c,
          int64_t ldc, const double* bias) {
  gemm_packed(PackedGemm<double>{trans_a, trans_b, m, n, k, alpha, a, Storage::kF64, lda, b,
                                 Storage::kF64, ldb, beta, c, ldc, bias});
}

void gemm(Storage storage, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
          const uint16_t* a, int64_t lda, const uint16_t* b, int64_t ldb, float beta, uint16_t* c,
          int64_t ldc, const uint16_t* bias) {
  if (gemm_backend_for(storage, m, n, k) == GemmBackend::kOnednn &&
      fits_onednn(sizeof(uint16_t), {lda, ldb, ldc}) && (bias == nullptr || alpha == 1.0f)) {
    run_onednn(onednn_type(storage), trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc,
               bias);
    return;
  }
  for (int64_t j = 0; j < n; j += kHalfCols) {
    const int64_t cols = std::min(kHalfCols, n - j);
    for (int64_t i = 0; i < m; i += kHalfRows) {
      const int64_t rows = std::min(kHalfRows, m - i);
      float* sum = scratch<float>(ScratchSlot::kGemmC, rows + 1, cols);
      float* wide_bias = nullptr;
      if (bias != nullptr) {
        wide_bias = sum + rows * cols;
        widen(storage, bias + j, wide_bias, cols);
      }
      gemm_packed(PackedGemm<float>{
          trans_a, trans_b, rows, cols, k, alpha, a + (trans_a ? i : i * lda), storage, lda,
          b + (trans_b ? j * ldb : j), storage, ldb, 0.0f, sum, cols, wide_bias});
      constexpr int64_t kGrain = 16384;
      parallel_for(rows, std::max<int64_t>(1, kGrain / cols), [&](int64_t begin, int64_t end) {
        float* old = beta != 0.0f ? scratch<float>(ScratchSlot::kConvert, cols) : nullptr;
        for (int64_t row = begin; row < end; ++row) {
          float* values = sum + row * cols;
          uint16_t* out = c + (i + row) * ldc + j;
          if (old != nullptr) {
            widen(storage, out, old, cols);
            for (int64_t q = 0; q < cols; ++q) values[q] += beta * old[q];
          }
          narrow(storage, values, out, cols);
        }
      });
    }
  }
}

void gemm_batched(const GemmBatch& batch, bool trans_a, bool trans_b, int64_t m, int64_t n,
                  int64_t k, float alpha, const float* a, int64_t lda, const float* b, int64_t ldb,
                  float beta, float* c, int64_t ldc) {
  run_batch(batch.count, multiplications(m, n, k), [&](int64_t i) {
    gemm(trans_a, trans_b, m, n, k, alpha, a + batch.a_offsets[i], lda, b + batch.b_offsets[i], ldb,
         beta, c + batch.c_offsets[i], ldc);
  });
}

void gemm_batched(const GemmBatch& batch, bool trans_a, bool trans_b, int64_t m, int64_t n,
                  int64_t k, double alpha, const double* a, int64_t lda, const double* b,
                  int64_t ldb, double beta, double* c, int64_t ldc) {
  run_batch(batch.count, multiplications(m, n, k), [&](int64_t i) {
    gemm(trans_a, trans_b, m, n, k, alpha, a + batch.a_offsets[i], lda, b + batch.b_offsets[i], ldb,
         beta, c + batch.c_offsets[i], ldc);
  });
}

void gemm_batched(Storage storage, const GemmBatch& batch, bool trans_a, bool trans_b, int64_t m,
                  int64_t n, int64_t k, float alpha, const uint16_t* a, int64_t lda,
                  const uint16_t* b, int64_t ldb, float beta, uint16_t* c, int64_t ldc) {
  run_batch(batch.count, multiplications(m, n, k), [&](int64_t i) {
    gemm(storage, trans_a, trans_b, m, n, k, alpha, a + batch.a_offsets[i], lda,
         b + batch.b_offsets[i], ldb, beta, c + batch.c_offsets[i], ldc);
  });
}

}  // namespace ortrain::cpu
