// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace ortrain::cpu {

// The instruction set that the kernels were dispatched to on this machine: "AVX3", "AVX2", "NEON",
// ... (Highway's names; AVX3 is AVX-512).
std::string_view simd_target_name();

// Who multiplies large matrices: "own", "onednn" for float32, or "onednn, also in bf16" where the
// processor has instructions for it.
std::string_view gemm_backend_name();

}  // namespace ortrain::cpu
