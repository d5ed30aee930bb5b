// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "ortrain/base/error.h"
#include "ortrain/ops/attention/attention_cudnn.h"

namespace ortrain::gpu {
namespace {

constexpr int kFirstCapability = 90;
constexpr int kNarrowest = 64, kWidest = 128;
constexpr int64_t kFewestKeys = 512;
constexpr int64_t kTile = 128;  // each length costs a second: not those of every batch

std::optional<std::string> slower(const AttentionProblem& p, bool backward, int capability) {
  if (backward) return "its backward with sums in a fixed order keeps all scores";
  if (capability < kFirstCapability) {
    return str("on sm_", capability, " our own kernel is not known to be slower");
  }
  if (p.head_dim != p.value_dim || p.head_dim < kNarrowest || p.head_dim > kWidest) {
    return str("heads of ", p.head_dim, " and ", p.value_dim, "; it is known to be faster from ",
               kNarrowest, " to ", kWidest);
  }
  if (p.keys < kFewestKeys || p.keys % kTile != 0 || p.queries % kTile != 0) {
    return str(p.queries, " queries and ", p.keys, " keys; it is known to be faster from ",
               kFewestKeys, " on, and a kernel is compiled for each multiple of ", kTile, " alone");
  }
  return std::nullopt;
}

}  // namespace

std::optional<CudnnAttention> cudnn_attention(const AttentionProblem& p, DType dtype, bool backward,
                                              bool keeps_logsumexp, std::string& why) {
  if (p.drops) {
    why = "dropout is drawn by numbers of ours";
  } else if (p.mask.kind != AttentionMask::Kind::none) {
    why = "a query that a mask lets see no key gives zeros here";
  } else if (p.sequences >= 0) {
    why = "several sequences in the rows";
  } else if (!(std::abs(static_cast<float>(p.scale)) >= std::numeric_limits<float>::min())) {
    why = "a scale that is 0 in float makes hidden scores NaN there";
  } else if (p.batch * p.heads * p.queries * p.keys * p.head_dim * p.value_dim == 0) {
    why = "nothing to be multiplied";
  } else {
    const auto strides = [](const AttentionStrides& s) {
      return CudnnAttention::Strides{s.batch, s.head, s.row};
    };
    return CudnnAttention{.backward = backward,
                          .dtype = dtype,
                          .batch = p.batch,
                          .heads = p.heads,
                          .kv_heads = p.kv_heads,
                          .queries = p.queries,
                          .keys = p.keys,
                          .head_dim = p.head_dim,
                          .value_dim = p.value_dim,
                          .q = strides(p.q_strides),
                          .k = strides(p.k_strides),
                          .v = strides(p.v_strides),
                          .out = strides(p.out_strides),
                          .scale = p.scale,
                          .causal = p.causal,
                          .keeps_logsumexp = backward || keeps_logsumexp};
  }
  return std::nullopt;
}

std::optional<std::string> attention_cudnn_refuses(const AttentionProblem& p, DType dtype,
                                                   bool backward, bool keeps_logsumexp,
                                                   int capability) {
  std::string why;
  const std::optional<CudnnUse> use = cudnn_use(why);
  if (!use) return why;
  if (*use == CudnnUse::off || *use == CudnnUse::conv) return "ORTRAIN_CUDNN leaves attention out";
  const auto problem = cudnn_attention(p, dtype, backward, keeps_logsumexp, why);
  if (!problem) return why;
  if (*use == CudnnUse::automatic) {
    if (auto reason = slower(p, backward, capability)) return reason;
  }
  if (!cudnn_plan(*problem, why)) return why;
  return std::nullopt;
}

KernelFn attention_cudnn(NodeSpec& spec, const AttentionProblem& p, bool backward, KernelFn own) {
  std::string why;
  const DType dtype = spec.input(0).dtype;
  const bool keeps_logsumexp = backward || spec.has_output(1);
  const auto problem = cudnn_attention(p, dtype, backward, keeps_logsumexp, why);
  const auto plan = problem ? cudnn_plan(*problem, why) : nullptr;
  if (!plan) return own;  // it had one when the kernel was chosen
  spec.request_workspace(std::max(spec.workspace_bytes(), cudnn_workspace(*plan)));
  const size_t inputs = backward ? 6 : 3, outputs = backward ? 3 : keeps_logsumexp ? 2 : 1;
  return [plan, own = std::move(own), inputs, outputs](const KernelArgs& args) {
    std::array<void*, 9> all{};
    for (size_t i = 0; i < inputs; ++i) all[i] = const_cast<void*>(args.in[i]);
    for (size_t i = 0; i < outputs; ++i) all[inputs + i] = args.out[i];
    const std::span<void* const> operands(all.data(), inputs + outputs);
    if (are_aligned(operands, kCudnnAlignment)) {
      run_cudnn(*plan, operands, args.workspace, args.stream);
    } else {
      own(args);
    }
  };
}

}  // namespace ortrain::gpu
