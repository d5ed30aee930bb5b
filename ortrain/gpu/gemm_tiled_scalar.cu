// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"
#include "ortrain/gpu/gemm_tiled.h"

namespace ortrain::gpu {

extern template GemmKernel tiled_gemm_of<Float16>(const GemmProblem& problem);
extern template GemmKernel tiled_gemm_of<BFloat16>(const GemmProblem& problem);

GemmKernel tiled_gemm(const GemmProblem& problem) {
  switch (problem.dtype) {
    case DType::f32:
      return tiled_gemm_of<float>(problem);
    case DType::f64:
      return tiled_gemm_of<double>(problem);
    case DType::f16:
      return tiled_gemm_of<Float16>(problem);
    case DType::bf16:
      return tiled_gemm_of<BFloat16>(problem);
    // Products modulo a power of two do not know signs.
    case DType::i32:
    case DType::u32:
      return tiled_gemm_of<uint32_t>(problem);
    case DType::i64:
    case DType::u64:
      return tiled_gemm_of<uint64_t>(problem);
    default:
      throw DTypeError(str("no matrix product for element type ", name_of(problem.dtype)));
  }
}

}  // namespace ortrain::gpu
