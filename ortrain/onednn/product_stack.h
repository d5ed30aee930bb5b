// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>

#include "oneapi/dnnl/dnnl.hpp"

// oneDNN before 3.12 lets float products that read their operands in place ("gemm:jit") have the
// stack pointer in a block of the heap: the frame of a signal that comes meanwhile is written over
// what lies before that block (uxlfoundation/oneDNN#4845).
namespace ortrain::onednn {

// Whether this library has such products.
inline bool leaves_the_stack() {
  const dnnl_version_t& version = *dnnl_version();
  return version.major < 3 || (version.major == 3 && version.minor < 12);
}

// Whether this implementation of a primitive of float may run them.
inline bool may_leave_the_stack(std::string_view implementation) {
  return leaves_the_stack() && implementation.find("gemm:") != implementation.npos;
}

inline bool has_avx512() {
  constexpr auto kAvx512 = static_cast<uint32_t>(dnnl::cpu_isa::avx512_core);
  return (static_cast<uint32_t>(dnnl::get_effective_cpu_isa()) & kAvx512) == kAvx512;
}

// The largest depth at which they hold a block of A in the stack: 4 pages, 256 bytes of them for
// other things, hold 48 floats for each of the depth with AVX-512, 16 with AVX2 (STACK_K_CAPACITY
// in jit_avx512_common_gemm_f32.cpp and jit_avx_gemm_f32.cpp). In multiples of 8.
inline int64_t depth_in_stack() {
  constexpr int64_t kAvx512 = 80;
  constexpr int64_t kAvx2 = 248;
  if (!leaves_the_stack()) return std::numeric_limits<int64_t>::max();
  return has_avx512() ? kAvx512 : kAvx2;
}

}  // namespace ortrain::onednn
