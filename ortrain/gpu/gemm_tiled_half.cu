// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/gemm_tiled.h"

namespace ortrain::gpu {

template GemmKernel tiled_gemm_of<Float16>(const GemmProblem& problem);
template GemmKernel tiled_gemm_of<BFloat16>(const GemmProblem& problem);

}  // namespace ortrain::gpu
