// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// In the place of cuBLASLt, beside the stand-in for the CUDA runtime: products are recorded with
// the memory that they touch, and computed nowhere.

#include <algorithm>
#include <cstring>
#include <map>

#include "ortrain/gpu/cublaslt_abi.h"

using namespace ortrain::gpu::cublaslt;

extern "C" int ortrain_stand_in_library_work(void* stream, const char* name,
                                             const void* const* addresses, const size_t* bytes,
                                             int operands);

namespace {

constexpr Status kInvalidValue = 7;

struct Attributes {
  std::map<int32_t, uint64_t> values;
  Status set(int32_t attribute, const void* value, size_t bytes) {
    if (bytes > sizeof(uint64_t)) return kInvalidValue;
    uint64_t kept = 0;
    std::memcpy(&kept, value, bytes);
    values[attribute] = kept;
    return kSuccess;
  }
  uint64_t get(int32_t attribute, uint64_t otherwise) const {
    const auto at = values.find(attribute);
    return at == values.end() ? otherwise : at->second;
  }
};
struct Matrices : Attributes {
  int32_t type = 0;
  uint64_t rows = 0, columns = 0;
  int64_t ld = 0;
  size_t width() const { return type == kF64 ? 8 : type == kF32 ? 4 : 2; }
  // By columns, from the first element to the last.
  size_t bytes() const {
    if (rows == 0 || columns == 0) return 0;
    const uint64_t batch = get(kBatchCount, 1);
    const uint64_t one = (columns - 1) * static_cast<uint64_t>(ld) + rows;
    return ((batch - 1) * get(kBatchStride, 0) + one) * width();
  }
};

}  // namespace

extern "C" {

Status cublasLtCreate(Handle* handle) {
  *handle = new char();
  return kSuccess;
}
size_t cublasLtGetVersion() { return 130000; }
const char* cublasLtGetStatusString(Status) { return "a status"; }
Status cublasLtMatmulDescCreate(MatmulDesc* made, int32_t, int32_t) {
  *made = new Attributes();
  return kSuccess;
}
Status cublasLtMatmulDescDestroy(MatmulDesc made) {
  delete static_cast<Attributes*>(made);
  return kSuccess;
}
Status cublasLtMatmulDescSetAttribute(MatmulDesc of, int32_t attribute, const void* value,
                                      size_t bytes) {
  return static_cast<Attributes*>(of)->set(attribute, value, bytes);
}
Status cublasLtMatrixLayoutCreate(Layout* made, int32_t type, uint64_t rows, uint64_t columns,
                                  int64_t ld) {
  auto* matrices = new Matrices();
  matrices->type = type, matrices->rows = rows, matrices->columns = columns, matrices->ld = ld;
  *made = matrices;
  return kSuccess;
}
Status cublasLtMatrixLayoutDestroy(Layout made) {
  delete static_cast<Matrices*>(made);
  return kSuccess;
}
Status cublasLtMatrixLayoutSetAttribute(Layout of, int32_t attribute, const void* value,
                                        size_t bytes) {
  return static_cast<Matrices*>(of)->set(attribute, value, bytes);
}
Status cublasLtMatmulPreferenceCreate(Preference* made) {
  *made = new Attributes();
  return kSuccess;
}
Status cublasLtMatmulPreferenceDestroy(Preference made) {
  delete static_cast<Attributes*>(made);
  return kSuccess;
}
Status cublasLtMatmulPreferenceSetAttribute(Preference of, int32_t attribute, const void* value,
                                            size_t bytes) {
  return static_cast<Attributes*>(of)->set(attribute, value, bytes);
}

// One algorithm, whose workspace is all that it may have, up to 1 MiB.
Status cublasLtMatmulAlgoGetHeuristic(Handle, MatmulDesc, Layout, Layout, Layout, Layout,
                                      Preference preference, int32_t wanted,
                                      HeuristicResult* results, int32_t* found) {
  *found = std::min(wanted, 1);
  if (*found == 0) return kSuccess;
  results[0] = {};
  results[0].workspace_bytes = std::min<uint64_t>(
      static_cast<Attributes*>(preference)->get(kMaxWorkspaceBytes, 0), uint64_t{1} << 20);
  return kSuccess;
}

Status cublasLtMatmul(Handle, MatmulDesc of, const void*, const void* a, Layout a_layout,
                      const void* b, Layout b_layout, const void*, const void* c, Layout c_layout,
                      void* d, Layout d_layout, const Algorithm*, void* workspace,
                      size_t workspace_bytes, void* stream) {
  const auto* const product = static_cast<const Attributes*>(of);
  const auto* const result = static_cast<const Matrices*>(d_layout);
  const auto pointer = [&](int32_t attribute) {
    return reinterpret_cast<const void*>(product->get(attribute, 0));
  };
  const bool has_bias = pointer(kBiasPointer) != nullptr;
  const auto aux_ld = product->get(kAuxLd, 0);
  const size_t aux = pointer(kAuxPointer) == nullptr || result->columns == 0
                         ? 0
                         : ((result->columns - 1) * aux_ld + result->rows) * result->width();
  const void* const addresses[] = {
      a, b, c, d, workspace, pointer(kBiasPointer), pointer(kAuxPointer)};
  const size_t bytes[] = {static_cast<const Matrices*>(a_layout)->bytes(),
                          static_cast<const Matrices*>(b_layout)->bytes(),
                          static_cast<const Matrices*>(c_layout)->bytes(),
                          result->bytes(),
                          workspace_bytes,
                          has_bias ? result->rows * result->width() : 0,
                          aux};
  return ortrain_stand_in_library_work(stream, "cublasLtMatmul", addresses, bytes, 7) == 0
             ? kSuccess
             : 14;
}

}  // extern "C"
