// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "ortrain/gpu/cudnn.h"
#include "ortrain/ops/attention/attention_device.h"
#include "ortrain/runtime/kernel.h"

// Attention by cuDNN. Its logsumexp is ours, so forward and backward may be by different kernels.
namespace ortrain::gpu {

// In the library's words. Null, with the reason in `why`, for what means something else there, or
// is not there: dropout (its random numbers are others), masks (a query that sees no key gives
// zeros here), several sequences in the rows.
std::optional<CudnnAttention> cudnn_attention(const AttentionProblem& p, DType dtype, bool backward,
                                              bool keeps_logsumexp, std::string& why);

// Refused as ORTRAIN_CUDNN says, and where the library is not there or has no algorithm. `auto`
// takes forwards on sm_90 and later, of heads of 64 to 128 and 512 keys or more. No backwards: one
// whose sums are in a fixed order keeps a matrix [queries, keys] per head.
std::optional<std::string> attention_cudnn_refuses(const AttentionProblem& p, DType dtype,
                                                   bool backward, bool keeps_logsumexp,
                                                   int capability);

// For nodes that are not refused; `own` is the kernel for operands at other addresses than the
// library takes, whose workspace `spec` has. Operands: inputs 0 to 2, outputs 0 and 1; for the
// backward inputs 0 to 5, outputs 0 to 2.
KernelFn attention_cudnn(NodeSpec& spec, const AttentionProblem& p, bool backward, KernelFn own);

}  // namespace ortrain::gpu
