// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// The C interface between the core and libortrain_onednn.so, which is loaded at run time. Plain
// data and function pointers: no C++ type and no exception crosses it.
extern "C" {

inline constexpr uint32_t kOrtrainOnednnAbi = 2;
inline constexpr char kOrtrainOnednnEntry[] = "ortrain_onednn_api";

enum OrtrainOnednnType : int32_t { kOrtrainF32 = 0, kOrtrainBF16 = 1, kOrtrainF16 = 2 };

// C[m, n] = alpha * op(A) * op(B) + beta * C + bias[n]; row-major, all of one type. Sums are float.
struct OrtrainOnednnGemm {
  int32_t type;  // OrtrainOnednnType
  int32_t trans_a, trans_b;
  int64_t m, n, k;
  float alpha;
  const void* a;
  int64_t lda;
  const void* b;
  int64_t ldb;
  float beta;
  void* c;
  int64_t ldc;
  const void* bias;  // or null; only with alpha = 1 for 16-bit types
};

enum OrtrainOnednnConvKind : int32_t {
  kOrtrainConvForward = 0,          // (x, weight, bias or null) -> y
  kOrtrainConvBackwardData = 1,     // (dy, weight) -> dx
  kOrtrainConvBackwardWeights = 2,  // (dy, x) -> dweight, dbias or null
};

// x [batch, in_channels, in...], weight [out_channels, in_channels / groups, kernel...],
// y [batch, out_channels, out...]; dense, 1 to 3 spatial axes.
struct OrtrainOnednnConv {
  int32_t kind;
  int32_t spatial;
  int32_t has_bias;
  int64_t batch, in_channels, out_channels, groups;
  int64_t in[3], kernel[3], out[3];
  int64_t stride[3], dilation[3];  // dilation 1 = dense
  int64_t pad_begin[3], pad_end[3];
};

// Every function returns 0 when it succeeded; `last_error` tells the calling thread why it did not.
struct OrtrainOnednnApi {
  uint32_t abi;
  const char* version;
  const char* (*last_error)();
  int (*gemm)(const OrtrainOnednnGemm* gemm);
  // Bit i is set where the processor multiplies matrices of OrtrainOnednnType i.
  uint32_t gemm_types;
  int (*conv_create)(const OrtrainOnednnConv* conv, void** handle);
  // `in` and `out` as listed at OrtrainOnednnConvKind. Calls on one handle must not overlap.
  int (*conv_run)(void* handle, const float* const* in, float* const* out);
  void (*conv_destroy)(void* handle);
};

using OrtrainOnednnEntry = const OrtrainOnednnApi* (*)();
}
