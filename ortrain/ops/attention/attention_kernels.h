// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/gpu/launch.h"
#include "ortrain/ops/attention/attention_device.h"

// The steps of attention on a GPU; each puts kernels onto the stream.
namespace ortrain::gpu {

// Without matrix units: any element type, any width of heads.
void attention_forward_tiles(DType type, const AttentionProblem& problem, void* stream);
// dq, or dk and dv, where they are wanted.
void attention_backward_tiles(DType type, const AttentionBackwardProblem& problem, void* stream);

// By matrix units: 16-bit types, heads of up to these widths.
inline constexpr int kMostForwardWidth = 256;
#if defined(__HIPCC__)
inline constexpr int kMostBackwardWidth = 128;
#else
inline constexpr int kMostBackwardWidth = 256;
#endif
void attention_forward_fragments(DType type, const AttentionProblem& problem, void* stream);
void attention_backward_fragments(DType type, const AttentionBackwardProblem& problem,
                                  void* stream);

// delta = sum(dout out) of every row.
void attention_row_products(DType type, const AttentionBackwardProblem& problem, void* delta,
                            void* stream);

// What holds for the rows behind the last sequence: results of row 0, or no gradients. Reports
// offsets that fall or leave the rows.
void attention_rest(DType type, const AttentionProblem& problem, const FaultReporter& faults,
                    void* stream);
void attention_rest(DType type, const AttentionBackwardProblem& problem,
                    const FaultReporter& faults, void* stream);

// The gradient of a float mask, `size` elements, in `workspace` of the size that
// attention_mask_workspace says; 0 where it is not needed.
void attention_mask_gradient(DType type, const AttentionBackwardProblem& problem, int64_t size,
                             void* dmask, void* workspace, void* stream);
ByteCount attention_mask_workspace(DType type, const AttentionProblem& problem, int64_t size);

}  // namespace ortrain::gpu
