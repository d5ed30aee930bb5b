// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

// The part of cuBLASLt's C interface that is used, with names of our own: the library is loaded at
// run time, and its header is not needed to build. Values and signatures are those of cublasLt.h
// and library_types.h of CUDA 12 and 13; tools/check_gpu_libraries.py compares them.
namespace ortrain::gpu::cublaslt {

using Status = int32_t;  // cublasStatus_t
inline constexpr Status kSuccess = 0;
inline constexpr Status kNotSupported = 15;

enum DataType : int32_t { kF32 = 0, kF64 = 1, kF16 = 2, kBF16 = 14 };  // cudaDataType_t
enum ComputeType : int32_t { kCompute32F = 68, kCompute64F = 70, kComputeFastTF32 = 77 };
enum Operation : int32_t { kPlain = 0, kTransposed = 1 };  // cublasOperation_t

enum MatmulAttribute : int32_t {  // cublasLtMatmulDescAttributes_t
  kTransA = 3,
  kTransB = 4,
  kEpilogue = 7,
  kBiasPointer = 8,
  kAuxPointer = 11,
  kAuxLd = 12,
  kAuxBatchStride = 13,
};
enum LayoutAttribute : int32_t { kBatchCount = 5, kBatchStride = 6 };
enum PreferenceAttribute : int32_t {
  kMaxWorkspaceBytes = 1,
  kReductionSchemeMask = 3,
  kMinAlignmentA = 5,
  kMinAlignmentB = 6,
  kMinAlignmentC = 7,
  kMinAlignmentD = 8,
};
// Bits of cublasLtEpilogue_t; kEpilogueNone when none of the others is there.
enum EpilogueBits : uint32_t {
  kEpilogueNone = 1,
  kEpilogueRelu = 2,
  kEpilogueBias = 4,
  kEpilogueBiasGradient = 16,
  kEpilogueGelu = 32,
  kEpilogueGeluGradient = 64 | 128,
  kEpilogueAux = 128,
};
// Sums of parts of the inner extent stay in the type of computation.
inline constexpr uint32_t kReduceInComputeType = 2;

struct Algorithm {  // cublasLtMatmulAlgo_t
  uint64_t data[8];
};
struct HeuristicResult {  // cublasLtMatmulHeuristicResult_t
  Algorithm algorithm;
  size_t workspace_bytes;
  Status state;
  float waves;
  int32_t reserved[4];
};
static_assert(sizeof(HeuristicResult) == 96);

using Handle = void*;
using MatmulDesc = void*;
using Layout = void*;
using Preference = void*;

// The functions, each named as in the library but for the prefix cublasLt.
struct Functions {
  Status (*Create)(Handle*);
  size_t (*GetVersion)();
  const char* (*GetStatusString)(Status);
  Status (*MatmulDescCreate)(MatmulDesc*, int32_t compute_type, int32_t scale_type);
  Status (*MatmulDescDestroy)(MatmulDesc);
  Status (*MatmulDescSetAttribute)(MatmulDesc, int32_t attribute, const void* value, size_t bytes);
  Status (*MatrixLayoutCreate)(Layout*, int32_t type, uint64_t rows, uint64_t columns, int64_t ld);
  Status (*MatrixLayoutDestroy)(Layout);
  Status (*MatrixLayoutSetAttribute)(Layout, int32_t attribute, const void* value, size_t bytes);
  Status (*MatmulPreferenceCreate)(Preference*);
  Status (*MatmulPreferenceDestroy)(Preference);
  Status (*MatmulPreferenceSetAttribute)(Preference, int32_t attribute, const void* value,
                                         size_t bytes);
  Status (*MatmulAlgoGetHeuristic)(Handle, MatmulDesc, Layout a, Layout b, Layout c, Layout d,
                                   Preference, int32_t wanted, HeuristicResult* results,
                                   int32_t* found);
  Status (*Matmul)(Handle, MatmulDesc, const void* alpha, const void* a, Layout a_layout,
                   const void* b, Layout b_layout, const void* beta, const void* c, Layout c_layout,
                   void* d, Layout d_layout, const Algorithm*, void* workspace,
                   size_t workspace_bytes, void* stream);
};

}  // namespace ortrain::gpu::cublaslt
