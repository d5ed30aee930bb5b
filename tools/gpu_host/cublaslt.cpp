// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// In the place of cuBLASLt, beside the stand-in for the CUDA runtime: products are recorded with
// the memory that they touch, and computed nowhere.

#include <algorithm>

#include "tests/cpp/cublaslt_objects.h"

using namespace ortrain::gpu::cublaslt;

extern "C" int ortrain_stand_in_library_work(void* stream, const char* name,
                                             const void* const* addresses, const size_t* bytes,
                                             int operands);

namespace {

size_t width_of(const LayoutOf& matrices) {
  return matrices.type == kF64 ? 8 : matrices.type == kF32 ? 4 : 2;
}

// By columns, from the first element to the last.
size_t bytes_of(const LayoutOf& matrices) {
  if (matrices.rows == 0 || matrices.columns == 0) return 0;
  const int64_t one = (matrices.columns - 1) * matrices.ld + matrices.rows;
  return static_cast<size_t>((matrices.batch() - 1) * matrices.stride() + one) * width_of(matrices);
}

}  // namespace

extern "C" {

// One algorithm, whose workspace is all that it may have, up to 1 MiB.
Status cublasLtMatmulAlgoGetHeuristic(Handle, MatmulDesc, Layout, Layout, Layout, Layout,
                                      Preference preference, int32_t wanted,
                                      HeuristicResult* results, int32_t* found) {
  *found = std::min(wanted, 1);
  if (*found == 0) return kSuccess;
  results[0] = {};
  results[0].workspace_bytes =
      std::min(static_cast<Attributes*>(preference)->get<uint64_t>(kMaxWorkspaceBytes, 0),
               uint64_t{1} << 20);
  return kSuccess;
}

Status cublasLtMatmul(Handle, MatmulDesc of, const void*, const void* a, Layout a_layout,
                      const void* b, Layout b_layout, const void*, const void* c, Layout c_layout,
                      void* d, Layout d_layout, const Algorithm*, void* workspace,
                      size_t workspace_bytes, void* stream) {
  const auto* const product = static_cast<const MatmulOf*>(of);
  const auto& result = *static_cast<const LayoutOf*>(d_layout);
  const void* const bias = product->get<void*>(kBiasPointer, nullptr);
  const void* const aux = product->get<void*>(kAuxPointer, nullptr);
  const auto rows = static_cast<size_t>(result.rows);
  const auto aux_columns =
      aux == nullptr || result.columns == 0
          ? 0
          : static_cast<size_t>((result.columns - 1) * product->get<int64_t>(kAuxLd, 0)) + rows;
  const void* const addresses[] = {a, b, c, d, workspace, bias, aux};
  const size_t bytes[] = {bytes_of(*static_cast<const LayoutOf*>(a_layout)),
                          bytes_of(*static_cast<const LayoutOf*>(b_layout)),
                          bytes_of(*static_cast<const LayoutOf*>(c_layout)),
                          bytes_of(result),
                          workspace_bytes,
                          bias == nullptr ? 0 : rows * width_of(result),
                          aux_columns * width_of(result)};
  return ortrain_stand_in_library_work(stream, "cublasLtMatmul", addresses, bytes, 7) == 0
             ? kSuccess
             : 14;
}

}  // extern "C"
