// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "ortrain/gpu/expr_kernel_plan.h"

namespace ortrain::gpu {

// A kernel as source text that NVRTC, hipRTC and a C++17 compiler for the host read, behind
// expr_prelude().
struct ExprSource {
  std::string entry;  // the kernel's name; follows from the text
  std::string text;
};
ExprSource print_source(const ExprKernelPlan& plan);

// What stands once in front of any number of kernels: expr_scalar_device.h, expr_block_device.h.
std::string_view expr_prelude();

}  // namespace ortrain::gpu
