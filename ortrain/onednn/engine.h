// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "oneapi/dnnl/dnnl.hpp"

namespace ortrain::onednn {

// The CPU engine of the process and the calling thread's stream. Both live as long as the process:
// their destructors would run after those of oneDNN itself.
inline dnnl::engine& cpu_engine() {
  static auto* engine = new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return *engine;
}

inline dnnl::stream& thread_stream() {
  static thread_local dnnl::stream stream(cpu_engine());
  return stream;
}

}  // namespace ortrain::onednn
