// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "ortrain/base/byte_count.h"
#include "ortrain/gpu/gemm.h"

// What Gemm is made of. Problems come here with all leading dimensions and strides filled in, and
// with at most kMaxBatchAxes axes of the batch, none of extent 1.
namespace ortrain::gpu {

inline constexpr int kMaxBatchAxes = 4;

struct GemmKernel {
  std::string_view name;
  ByteCount workspace_bytes;
  // False, with nothing done: it cannot take these addresses.
  std::function<bool(const GemmOperands&, void* workspace, void* stream)> run;
};

// The address that many bytes behind; null stays null.
inline const void* moved(const void* address, int64_t bytes) {
  return address == nullptr ? nullptr : static_cast<const char*>(address) + bytes;
}
inline void* moved(void* address, int64_t bytes) {
  return address == nullptr ? nullptr : static_cast<char*>(address) + bytes;
}

// By kernels of our own: no activation, no bias gradient.
GemmKernel tiled_gemm(const GemmProblem& problem);
template <class T>
GemmKernel tiled_gemm_of(const GemmProblem& problem);

// By the library of the device's maker. Null, with the reason in `why`, where there is none or it
// has no way to do all that the problem asks for.
std::optional<GemmKernel> library_gemm(const GemmProblem& problem, std::string& why);

// The passes below take D as one matrix of all rows of the batch.
// aux = Z and D = activation(Z), or D = D * activation'(aux), in place on D. Nothing for none.
void apply_activation(const GemmProblem& problem, const GemmOperands& operands, void* stream);

// bias_gradient[n] = sums of D's columns.
ByteCount column_sum_workspace(const GemmProblem& problem);
void sum_columns(const GemmProblem& problem, const GemmOperands& operands, void* workspace,
                 void* stream);

// D = C, with C's strides, for every member of the batch.
void spread_addend(const GemmProblem& problem, const GemmOperands& operands, void* stream);

}  // namespace ortrain::gpu
