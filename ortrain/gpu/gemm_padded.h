// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "ortrain/gpu/gemm_kernel.h"

// Products whose rows begin anywhere: 50257 numbers of 16 bits are no multiple of 16 bytes, and a
// library has only slow kernels for such rows. Operands are copied to rows that are, with zeros
// behind them, and the result back. In pieces of D, so that copies do not grow with the problem.
namespace ortrain::gpu {

// Copies of what all pieces share, and those of one piece, take that much each.
inline constexpr int64_t kMostPaddedBytes = int64_t{256} << 20;

// `extent` rounded up so that rows of as many elements begin at multiples of 16 bytes, long ones at
// multiples of 128; itself where they do.
int64_t padded_extent(int64_t extent, int64_t element_size);

// Whether a product of `work` operations gains by whole vectors what `bytes` of copies, read
// and written, and `launches` more cost. alignment: that of its rows as they are, in bytes.
bool padding_pays(double work, int alignment, double bytes, double launches, DType dtype);
// The same of a problem whose operands are copied where they have to be.
bool padding_pays(const GemmProblem& problem);
// Tests let all products with odd rows go this way. For plans made later.
void set_always_padding(bool always);

// By products of the library on copies; no activation, no bias gradient. Null, with the reason in
// `why`, where the library or memory does not allow it.
std::optional<GemmKernel> padded_gemm(const GemmProblem& problem, int64_t most_bytes,
                                      std::string& why);

}  // namespace ortrain::gpu
