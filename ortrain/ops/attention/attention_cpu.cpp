// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <type_traits>

#include "ortrain/cpu/attention.h"
#include "ortrain/ops/attention/attention_layout.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::cpu {
namespace {

int64_t constant(const Dim& dim) { return dim.constant(); }

// Inputs q, k, v begin at `first`; mask and seed stand at `mask` and behind it.
AttentionForward problem_of(const NodeSpec& spec, size_t first, size_t mask) {
  const AttributeReader attrs = spec.attrs();
  const ops::AttentionExtents e(attrs, to_shape(spec.input(first).dims),
                                to_shape(spec.input(first + 1).dims),
                                to_shape(spec.input(first + 2).dims));
  AttentionForward a = {};
  a.shape = {constant(e.batch), constant(e.heads),    constant(e.kv_heads), constant(e.queries),
             constant(e.keys),  constant(e.head_dim), constant(e.value_dim)};
  const AttentionShape& s = a.shape;
  a.options = {.scale = ops::attention_scale(attrs, s.head_dim),
               .causal = attrs.int_("is_causal") != 0,
               .dropout = attrs.float_("dropout"),
               .stream = static_cast<uint64_t>(attrs.int_("stream"))};
  a.rows = {s.heads * s.queries, s.queries, s.keys};
  a.storage = storage_of(spec.input(first).dtype);
  auto strides = [&](int64_t heads, int64_t rows, int64_t dim) {
    return e.packed ? AttentionStrides{rows * heads * dim, dim, heads * dim}
                    : AttentionStrides{heads * rows * dim, rows * dim, dim};
  };
  a.q_strides = strides(s.heads, s.queries, s.head_dim);
  a.k_strides = strides(s.kv_heads, s.keys, s.head_dim);
  a.v_strides = strides(s.kv_heads, s.keys, s.value_dim);
  a.out_strides = strides(s.heads, s.queries, s.value_dim);

  if (spec.has_input(mask)) {
    const Dims& dims = spec.input(mask).dims;
    const Dims dense = strides_of(dims);
    int64_t* const by_axis[] = {&a.mask.batch, &a.mask.head, &a.mask.row, &a.mask.col};
    for (size_t i = 0; i < dims.size(); ++i) {
      *by_axis[4 - dims.size() + i] = dims[i] == 1 ? 0 : dense[i];
    }
    a.mask.kind = spec.input(mask).dtype == DType::boolean ? AttentionMask::Kind::kBool
                                                           : AttentionMask::Kind::kFloat;
  }
  return a;
}

// Fills in the addresses of one run.
void bind(AttentionForward& a, const KernelArgs& args, size_t first, size_t mask) {
  a.q = args.in[first];
  a.k = args.in[first + 1];
  a.v = args.in[first + 2];
  if (a.mask.kind != AttentionMask::Kind::kNone) a.mask.data = args.in[mask];
  if (a.options.dropout > 0.0) {
    a.options.seed = static_cast<uint64_t>(*args.input<int64_t>(mask + 1));
  }
}

// Number of sequences that share the rows; -1 without the input 'offsets'.
int64_t sequences_of(const NodeSpec& spec, size_t offsets) {
  return spec.has_input(offsets) ? spec.input(offsets).numel() - 1 : -1;
}

template <bool kBlocked, class Problem>
void run(const Problem& problem, const AttentionForward& forward, const KernelArgs& args,
         int64_t sequences, size_t offsets) {
  if (sequences < 0) {
    if constexpr (kBlocked) {
      attention_blocked(problem);
    } else {
      attention_reference(problem);
    }
    return;
  }
  const AttentionSequences rows{args.input<int64_t>(offsets), sequences};
  check_sequences(rows, forward.shape.queries);
  if constexpr (kBlocked) {
    attention_blocked(problem, rows);
  } else {
    for (int64_t n = 0; n < sequences; ++n) attention_reference(sequence_of(problem, rows, n));
    if constexpr (std::is_same_v<Problem, AttentionForward>) {
      fill_rest(problem, rows);
    } else {
      clear_rest(problem, rows);
    }
  }
}

template <bool kBlocked>
KernelFn make_forward(NodeSpec& spec) {
  const bool has_lse = spec.has_output(1);
  return [problem = problem_of(spec, 0, 3), has_lse,
          sequences = sequences_of(spec, 5)](const KernelArgs& args) {
    AttentionForward a = problem;
    bind(a, args, 0, 3);
    a.out = args.out[0];
    a.logsumexp = has_lse ? args.out[1] : nullptr;
    run<kBlocked>(a, a, args, sequences, 5);
  };
}

constexpr size_t kDq = 0, kDk = 1, kDv = 2, kDmask = 3;

template <bool kBlocked>
KernelFn make_backward(NodeSpec& spec) {
  AttentionBackward problem = {};
  problem.forward = problem_of(spec, 1, 6);
  const AttentionForward& a = problem.forward;
  problem.dout_strides = a.out_strides;
  problem.dq_strides = a.q_strides;
  problem.dk_strides = a.k_strides;
  problem.dv_strides = a.v_strides;
  const bool wants_dmask = spec.has_output(kDmask);
  problem.mask_size = wants_dmask ? spec.output(kDmask).numel() : 0;
  std::array<bool, 4> wanted;
  for (size_t i = 0; i < 4; ++i) wanted[i] = spec.has_output(i);

  // The gradient of a 16-bit mask is summed in float first.
  const bool narrow_mask = wants_dmask && storage_size(a.storage) == 2;
  const int64_t sequences = sequences_of(spec, 8);
  const int64_t own =
      kBlocked && sequences < 0
          ? (attention_backward_workspace(a.shape, a.mask, wants_dmask) + 63) / 64 * 64
          : 0;
  spec.request_workspace(bytes_of<char>(own) +
                         bytes_of<float>(narrow_mask ? problem.mask_size : 0));
  return [problem, wanted, narrow_mask, own, sequences](const KernelArgs& args) {
    AttentionBackward g = problem;
    bind(g.forward, args, 1, 6);
    g.dout = args.in[0];
    // Read only, although the forward problem writes them.
    g.forward.out = const_cast<void*>(args.in[4]);
    g.forward.logsumexp = const_cast<void*>(args.in[5]);
    g.dq = wanted[kDq] ? args.out[kDq] : nullptr;
    g.dk = wanted[kDk] ? args.out[kDk] : nullptr;
    g.dv = wanted[kDv] ? args.out[kDv] : nullptr;
    g.workspace = args.workspace;
    float* sums = reinterpret_cast<float*>(static_cast<char*>(args.workspace) + own);
    g.dmask = !wanted[kDmask] ? nullptr : narrow_mask ? sums : args.out[kDmask];
    run<kBlocked>(g, g.forward, args, sequences, 8);
    if (narrow_mask) {
      narrow(g.forward.storage, sums, static_cast<uint16_t*>(args.out[kDmask]), g.mask_size);
    }
  };
}

}  // namespace

void register_attention(KernelRegistry& registry) {
  constexpr DTypeSet kBlockedTypes{DType::f32, DType::f16, DType::bf16};
  registry.add("ortrain::Attention",
               {{.name = "blocked", .types = kBlockedTypes, .make = make_forward<true>},
                {.name = "ref", .make = make_forward<false>}});
  registry.add("ortrain::AttentionGrad",
               {{.name = "blocked", .types = kBlockedTypes, .make = make_backward<true>},
                {.name = "ref", .make = make_backward<false>}});
}

}  // namespace ortrain::cpu
