// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// A shared library with the functions of cuBLASLt that the engine uses, working on host memory:
// what the engine asks the library for can be tested without a GPU. By columns, sums in double.

#include <cmath>
#include <vector>

#include "ortrain/base/half.h"
#include "tests/cpp/cublaslt_objects.h"

using namespace ortrain;
using namespace ortrain::gpu::cublaslt;
using namespace cublaslt_stand_in;

namespace {

double load(int32_t type, const void* data, int64_t i) {
  switch (type) {
    case kF64:
      return static_cast<const double*>(data)[i];
    case kF16:
      return static_cast<double>(static_cast<const Float16*>(data)[i]);
    case kBF16:
      return static_cast<double>(static_cast<const BFloat16*>(data)[i]);
    default:
      return static_cast<double>(static_cast<const float*>(data)[i]);
  }
}
void store(int32_t type, void* data, int64_t i, double value) {
  switch (type) {
    case kF64:
      static_cast<double*>(data)[i] = value;
      break;
    case kF16:
      static_cast<Float16*>(data)[i] = Float16(static_cast<float>(value));
      break;
    case kBF16:
      static_cast<BFloat16*>(data)[i] = BFloat16(static_cast<float>(value));
      break;
    default:
      static_cast<float*>(data)[i] = static_cast<float>(value);
  }
}

// Matrices of 16-bit numbers whose columns begin or end within 16 bytes.
int64_t odd_matrices = 0;
bool is_odd(const LayoutOf& layout) {
  if (layout.type != kF16 && layout.type != kBF16) return false;
  return layout.rows % 8 != 0 || layout.ld % 8 != 0 || layout.stride() % 8 != 0;
}

double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
double gelu_slope(double x) { return (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5; }

}  // namespace

extern "C" {

// Of the products since it was asked last.
int64_t ortrain_stand_in_odd_matrices() {
  const int64_t count = odd_matrices;
  odd_matrices = 0;
  return count;
}

Status cublasLtMatmulAlgoGetHeuristic(Handle, MatmulDesc desc, Layout, Layout, Layout,
                                      Layout d_layout, Preference preference, int32_t,
                                      HeuristicResult* results, int32_t* found) {
  *found = 0;
  const auto* wanted = static_cast<Attributes*>(preference);
  if (wanted->get<uint64_t>(kMaxWorkspaceBytes, 0) < 64) return kNotSupported;
  for (const int32_t operand : {kMinAlignmentA, kMinAlignmentB, kMinAlignmentC, kMinAlignmentD}) {
    if (wanted->get<uint32_t>(operand, 256) < 4) return kNotSupported;
  }
  const auto* matmul = static_cast<MatmulOf*>(desc);
  const auto* d = static_cast<LayoutOf*>(d_layout);
  const auto epilogue = matmul->get<uint32_t>(kEpilogue, kEpilogueNone);
  const auto aux_ld = matmul->get<int64_t>(kAuxLd, 0);
  if ((epilogue & kEpilogueAux) != 0 && (aux_ld % 8 != 0 || aux_ld < d->rows)) return kInvalidValue;
  if ((matmul->scale == kF64) != (matmul->compute == kCompute64F)) return kInvalidValue;
  if ((d->type == kF64) != (matmul->compute == kCompute64F)) return kInvalidValue;
  results[0] = {};
  results[0].algorithm.data[0] = 42;
  results[0].workspace_bytes = 64;
  *found = 1;
  return kSuccess;
}

Status cublasLtMatmul(Handle, MatmulDesc desc, const void* alpha, const void* a, Layout a_layout,
                      const void* b, Layout b_layout, const void* beta, const void* c,
                      Layout c_layout, void* d, Layout d_layout, const Algorithm* algorithm,
                      void* workspace, size_t workspace_bytes, void*) {
  const auto* matmul = static_cast<MatmulOf*>(desc);
  const auto *la = static_cast<LayoutOf*>(a_layout), *lb = static_cast<LayoutOf*>(b_layout),
             *lc = static_cast<LayoutOf*>(c_layout), *ld = static_cast<LayoutOf*>(d_layout);
  if (algorithm->data[0] != 42 || workspace == nullptr || workspace_bytes < 64)
    return kInvalidValue;
  for (const LayoutOf* layout : {la, lb, lc, ld}) odd_matrices += is_odd(*layout) ? 1 : 0;
  const bool trans_a = matmul->get<int32_t>(kTransA, 0) != 0;
  const bool trans_b = matmul->get<int32_t>(kTransB, 0) != 0;
  const int64_t m = ld->rows, n = ld->columns, k = trans_a ? la->rows : la->columns;
  if ((trans_a ? la->columns : la->rows) != m || (trans_b ? lb->rows : lb->columns) != n ||
      (trans_b ? lb->columns : lb->rows) != k || lc->rows != m || lc->columns != n ||
      la->batch() != ld->batch() || lb->batch() != ld->batch() || lc->batch() != ld->batch()) {
    return kInvalidValue;
  }
  const auto epilogue = matmul->get<uint32_t>(kEpilogue, kEpilogueNone);
  void* const bias = matmul->get<void*>(kBiasPointer, nullptr);
  void* const aux = matmul->get<void*>(kAuxPointer, nullptr);
  const auto aux_ld = matmul->get<int64_t>(kAuxLd, 0);
  const auto aux_stride = matmul->get<int64_t>(kAuxBatchStride, 0);
  const double scale = load(matmul->scale, alpha, 0), keep = load(matmul->scale, beta, 0);
  const bool is_gradient = (epilogue & kEpilogueGeluGradient) == kEpilogueGeluGradient;
  std::vector<double> row_sums(static_cast<size_t>(m), 0.0);
  for (int64_t batch = 0; batch < ld->batch(); ++batch) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t i = 0; i < m; ++i) {
        double sum = 0;
        for (int64_t q = 0; q < k; ++q) {
          const int64_t at_a = trans_a ? i * la->ld + q : q * la->ld + i;
          const int64_t at_b = trans_b ? q * lb->ld + j : j * lb->ld + q;
          sum += load(la->type, a, batch * la->stride() + at_a) *
                 load(lb->type, b, batch * lb->stride() + at_b);
        }
        double z = scale * sum;
        if (keep != 0.0) z += keep * load(lc->type, c, batch * lc->stride() + j * lc->ld + i);
        if ((epilogue & kEpilogueBias) != 0) z += load(la->type, bias, i);
        const int64_t at_aux = batch * aux_stride + j * aux_ld + i;
        if (is_gradient) {
          z *= gelu_slope(load(ld->type, aux, at_aux));
        } else {
          if ((epilogue & kEpilogueAux) != 0) store(ld->type, aux, at_aux, z);
          if ((epilogue & kEpilogueRelu) != 0) z = std::fmax(z, 0.0);
          if ((epilogue & kEpilogueGelu) != 0) z = gelu(z);
        }
        row_sums[static_cast<size_t>(i)] += z;
        store(ld->type, d, batch * ld->stride() + j * ld->ld + i, z);
      }
    }
  }
  if ((epilogue & kEpilogueBiasGradient) != 0) {
    for (int64_t i = 0; i < m; ++i) store(ld->type, bias, i, row_sums[static_cast<size_t>(i)]);
  }
  return kSuccess;
}

}  // extern "C"
