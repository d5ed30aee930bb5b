// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What libraries that stand in for cuBLASLt have in common: the objects that describe a product,
// and the functions that make, change and drop them. Defined here, so in one file of a library.

#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "ortrain/gpu/cublaslt_abi.h"

namespace cublaslt_stand_in {

using namespace ortrain::gpu::cublaslt;

constexpr Status kInvalidValue = 7;

// Attributes as they were set; the size is checked where they are read.
struct Attributes {
  std::map<int32_t, std::vector<char>> values;
  Status set(int32_t attribute, const void* value, size_t bytes) {
    const auto* from = static_cast<const char*>(value);
    values[attribute].assign(from, from + bytes);
    return kSuccess;
  }
  template <class T>
  T get(int32_t attribute, T otherwise) const {
    const auto at = values.find(attribute);
    if (at == values.end()) return otherwise;
    if (at->second.size() != sizeof(T)) std::abort();
    T value;
    std::memcpy(&value, at->second.data(), sizeof(T));
    return value;
  }
};
struct LayoutOf : Attributes {
  int32_t type = 0;
  int64_t rows = 0, columns = 0, ld = 0;
  int32_t batch() const { return get<int32_t>(kBatchCount, 1); }
  int64_t stride() const { return get<int64_t>(kBatchStride, 0); }
};
struct MatmulOf : Attributes {
  int32_t compute = 0, scale = 0;
};

}  // namespace cublaslt_stand_in

extern "C" {

using namespace cublaslt_stand_in;

Status cublasLtCreate(Handle* handle) {
  static int one;
  *handle = &one;
  return kSuccess;
}
size_t cublasLtGetVersion() { return 1; }
const char* cublasLtGetStatusString(Status) { return "status of the stand-in"; }

Status cublasLtMatmulDescCreate(MatmulDesc* desc, int32_t compute, int32_t scale) {
  auto* made = new MatmulOf();
  made->compute = compute;
  made->scale = scale;
  *desc = made;
  return kSuccess;
}
Status cublasLtMatmulDescDestroy(MatmulDesc desc) {
  delete static_cast<MatmulOf*>(desc);
  return kSuccess;
}
Status cublasLtMatmulDescSetAttribute(MatmulDesc desc, int32_t attribute, const void* value,
                                      size_t bytes) {
  return static_cast<MatmulOf*>(desc)->set(attribute, value, bytes);
}
Status cublasLtMatrixLayoutCreate(Layout* layout, int32_t type, uint64_t rows, uint64_t columns,
                                  int64_t ld) {
  auto* made = new LayoutOf();
  made->type = type;
  made->rows = static_cast<int64_t>(rows);
  made->columns = static_cast<int64_t>(columns);
  made->ld = ld;
  *layout = made;
  return ld >= made->rows ? kSuccess : kInvalidValue;
}
Status cublasLtMatrixLayoutDestroy(Layout layout) {
  delete static_cast<LayoutOf*>(layout);
  return kSuccess;
}
Status cublasLtMatrixLayoutSetAttribute(Layout layout, int32_t attribute, const void* value,
                                        size_t bytes) {
  return static_cast<LayoutOf*>(layout)->set(attribute, value, bytes);
}
Status cublasLtMatmulPreferenceCreate(Preference* preference) {
  *preference = new Attributes();
  return kSuccess;
}
Status cublasLtMatmulPreferenceDestroy(Preference preference) {
  delete static_cast<Attributes*>(preference);
  return kSuccess;
}
Status cublasLtMatmulPreferenceSetAttribute(Preference preference, int32_t attribute,
                                            const void* value, size_t bytes) {
  return static_cast<Attributes*>(preference)->set(attribute, value, bytes);
}

}  // extern "C"
