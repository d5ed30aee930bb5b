// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/narrow.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/strided_copy.h"
#include "ortrain/ops/attention/attention_cudnn.h"
#include "ortrain/ops/attention/attention_kernels.h"
#include "ortrain/ops/attention/attention_layout.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain::gpu {
namespace {

// Inputs q, k, v begin at `first`.
ops::AttentionExtents extents_of(const NodeSpec& spec, size_t first) {
  return {spec.attrs(), to_shape(spec.input(first).dims), to_shape(spec.input(first + 1).dims),
          to_shape(spec.input(first + 2).dims)};
}

// Why no kernel takes the node: elements of a head are counted in int, and every tile of rows is a
// block, for each part of the heads' width.
std::optional<std::string> too_large(const NodeSpec& spec, size_t first, size_t mask) {
  constexpr int64_t kMostWidth = int64_t{1} << 20;
  // The fewest rows of a tile of any kernel, and the columns of wide heads.
  constexpr int64_t kFewestRows = 32, kColumns = 256;
  const ops::AttentionExtents e = extents_of(spec, first);
  const int64_t head = e.head_dim.constant(), value = e.value_dim.constant();
  if (std::max(head, value) > kMostWidth) return str("heads are wider than ", kMostWidth);
  const int64_t sequences = spec.has_input(mask + 2) ? spec.input(mask + 2).numel() : 1;
  const auto has_grid = [&](const Dim& heads, const Dim& rows) {
    const int64_t tiles = rows.constant() / kFewestRows + sequences;
    return static_cast<double>(e.batch.constant()) * static_cast<double>(heads.constant()) *
               static_cast<double>(tiles) *
               static_cast<double>(head / kColumns + value / kColumns + 2) <
           0x1p31;
  };
  if (!has_grid(e.heads, e.queries) || !has_grid(e.kv_heads, e.keys)) {
    return "more tiles than a launch has blocks";
  }
  return std::nullopt;
}

// Mask, seed and offsets stand at `mask` and behind it.
AttentionProblem problem_of(const NodeSpec& spec, size_t first, size_t mask) {
  const AttributeReader attrs = spec.attrs();
  const ops::AttentionExtents e = extents_of(spec, first);
  AttentionProblem p = {};
  p.batch = e.batch.constant();
  p.heads = e.heads.constant();
  p.kv_heads = e.kv_heads.constant();
  p.queries = e.queries.constant();
  p.keys = e.keys.constant();
  p.head_dim = narrow_checked<int>(e.head_dim.constant());
  p.value_dim = narrow_checked<int>(e.value_dim.constant());
  p.scale = ops::attention_scale(attrs, p.head_dim);
  p.causal = attrs.int_("is_causal") != 0;
  const double dropout = attrs.float_("dropout");
  p.drops = dropout > 0.0;
  p.threshold = half_threshold(dropout);
  p.kept = half_scale(dropout);
  p.stream = static_cast<uint64_t>(attrs.int_("stream"));
  p.sequences = spec.has_input(mask + 2) ? spec.input(mask + 2).numel() - 1 : -1;
  const auto strides = [&](int64_t heads, int64_t rows, int64_t dim) {
    return e.packed ? AttentionStrides{rows * heads * dim, dim, heads * dim}
                    : AttentionStrides{heads * rows * dim, rows * dim, dim};
  };
  p.q_strides = strides(p.heads, p.queries, p.head_dim);
  p.k_strides = strides(p.kv_heads, p.keys, p.head_dim);
  p.v_strides = strides(p.kv_heads, p.keys, p.value_dim);
  p.out_strides = strides(p.heads, p.queries, p.value_dim);
  if (spec.has_input(mask)) {
    const Dims& dims = spec.input(mask).dims;
    const Dims dense = strides_of(dims);
    int64_t* const by_axis[] = {&p.mask.batch, &p.mask.head, &p.mask.row, &p.mask.col};
    for (size_t i = 0; i < dims.size(); ++i) {
      *by_axis[4 - dims.size() + i] = dims[i] == 1 ? 0 : dense[i];
    }
    p.mask.kind = spec.input(mask).dtype == DType::boolean ? AttentionMask::Kind::boolean
                                                           : AttentionMask::Kind::floats;
  }
  return p;
}

// Our own kernels; a library's stands in front.
enum class Way { fragments, tiles };

// Whether rows of `dim` elements at `data` may be read and written by packs: of 16 bytes, or of
// four elements.
bool in_packs(const void* data, int dim, DType type, Way way) {
  const size_t bytes = way == Way::fragments ? 16 : std::min<size_t>(4 * size_of(type), 16);
  return dim % (way == Way::fragments ? 8 : 4) == 0 &&
         reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

std::optional<std::string> too_wide(const AttentionProblem& p, int most) {
  // Rows and keys of a sequence are counted in int, tiles behind the end included.
  constexpr int64_t kMostRows = int64_t{1} << 30;
  if (std::max(p.queries, p.keys) > kMostRows) return str("has more than ", kMostRows, " rows");
  if (std::max(p.head_dim, p.value_dim) <= most) return std::nullopt;
  return str("heads are wider than ", most);
}

// Wide heads take 102 KiB of shared memory, which consumers' devices do not have.
int most_backward_width() {
  constexpr int64_t kForWideHeads = int64_t{102} << 10;
  return shared_memory_per_block(current_device()) >= kForWideHeads
             ? kMostBackwardWidth
             : std::min(kMostBackwardWidth, 128);
}

// Fills in the addresses of one run.
void bind(AttentionProblem& p, const KernelArgs& args, DType type, Way way, size_t first,
          size_t mask) {
  p.q = args.in[first];
  p.k = args.in[first + 1];
  p.v = args.in[first + 2];
  if (p.mask.kind != AttentionMask::Kind::none) p.mask.data = args.in[mask];
  if (p.drops) p.seed = args.input<int64_t>(mask + 1);
  if (p.sequences >= 0) p.offsets = args.input<int64_t>(mask + 2);
  p.q_packs = in_packs(p.q, p.head_dim, type, way);
  p.k_packs = in_packs(p.k, p.head_dim, type, way);
  p.v_packs = in_packs(p.v, p.value_dim, type, way);
  p.out_packs = in_packs(p.out, p.value_dim, type, way);
}

template <Way kWay>
KernelFn make_forward(NodeSpec& spec) {
  const DType type = spec.input(0).dtype;
  return [problem = problem_of(spec, 0, 3), type,
          has_lse = spec.has_output(1)](const KernelArgs& args) {
    AttentionProblem p = problem;
    p.out = args.out[0];
    p.logsumexp = has_lse ? args.out[1] : nullptr;
    bind(p, args, type, kWay, 0, 3);
    if constexpr (kWay == Way::fragments) {
      attention_forward_fragments(type, p, args.stream);
    } else {
      attention_forward_tiles(type, p, args.stream);
    }
    if (p.sequences >= 0) attention_rest(type, p, FaultReporter(args), args.stream);
  };
}

template <Way kWay>
KernelFn make_backward(NodeSpec& spec) {
  const DType type = spec.input(0).dtype;
  const AttentionProblem problem = problem_of(spec, 1, 6);
  const int64_t mask_size = spec.has_output(3) ? spec.output(3).numel() : 0;
  const ByteCount deltas =
      ByteCount::of(size_of(spec.input(5).dtype), problem.batch, problem.heads, problem.queries)
          .rounded_up(64);
  const size_t delta_bytes = deltas.value();
  const std::array<bool, 3> wanted{spec.has_output(0), spec.has_output(1), spec.has_output(2)};
  // Scores of which each has a mask of its own have their gradients in registers beside dq.
  const bool mask_beside =
      kWay == Way::fragments && wanted[0] && mask_size > 0 &&
      mask_size == count_elements(problem.batch, problem.heads, problem.queries, problem.keys);
  const int64_t mask_apart = mask_beside ? 0 : mask_size;
  spec.request_workspace(
      mask_apart > 0 ? deltas + attention_mask_workspace(type, problem, mask_apart) : deltas);
  return [=](const KernelArgs& args) {
    AttentionBackwardProblem p = {};
    p.forward = problem;
    p.dout = args.in[0];
    // Read only, although the forward problem writes them.
    p.forward.out = const_cast<void*>(args.in[4]);
    p.forward.logsumexp = const_cast<void*>(args.in[5]);
    bind(p.forward, args, type, kWay, 1, 6);
    p.delta = args.workspace;
    const auto output = [&](size_t i) { return wanted[i] ? args.out[i] : nullptr; };
    p.dq = output(0);
    p.dk = output(1);
    p.dv = output(2);
    p.dout_packs = in_packs(p.dout, problem.value_dim, type, kWay);
    p.dq_packs = in_packs(p.dq, problem.head_dim, type, kWay);
    p.dk_packs = in_packs(p.dk, problem.head_dim, type, kWay);
    p.dv_packs = in_packs(p.dv, problem.value_dim, type, kWay);

    if (mask_beside) {
      p.dmask = args.out[3];
      // Nothing is made of what is above the diagonal.
      if (problem.causal) fill_elements(p.dmask, mask_size, size_of(type), 0, args.stream);
    }

    attention_row_products(type, p, args.workspace, args.stream);
    if constexpr (kWay == Way::fragments) {
      attention_backward_fragments(type, p, args.stream);
    } else {
      attention_backward_tiles(type, p, args.stream);
    }
    attention_mask_gradient(type, p, mask_apart, mask_apart > 0 ? args.out[3] : nullptr,
                            static_cast<char*>(args.workspace) + delta_bytes, args.stream);
    if (p.forward.sequences >= 0) {
      attention_rest(type, p, FaultReporter(args), args.stream);
    }
  };
}

std::optional<std::string> forward_too_large(const NodeSpec& spec) { return too_large(spec, 0, 3); }
std::optional<std::string> backward_too_large(const NodeSpec& spec) {
  return too_large(spec, 1, 6);
}

std::optional<std::string> forward_too_wide(const NodeSpec& spec) {
  if (auto why = forward_too_large(spec)) return why;
  return too_wide(problem_of(spec, 0, 3), kMostForwardWidth);
}
std::optional<std::string> backward_too_wide(const NodeSpec& spec) {
  if (auto why = backward_too_large(spec)) return why;
  return too_wide(problem_of(spec, 1, 6), most_backward_width());
}

std::optional<std::string> forward_not_by_cudnn(const NodeSpec& spec) {
  if (auto why = forward_too_large(spec)) return why;
  return attention_cudnn_refuses(problem_of(spec, 0, 3), spec.input(0).dtype, false,
                                 spec.has_output(1), compute_capability(current_device()));
}
std::optional<std::string> backward_not_by_cudnn(const NodeSpec& spec) {
  if (auto why = backward_too_large(spec)) return why;
  if (!spec.has_output(0) || !spec.has_output(1) || !spec.has_output(2)) {
    return "it makes all three gradients";
  }
  return attention_cudnn_refuses(problem_of(spec, 1, 6), spec.input(0).dtype, true, true,
                                 compute_capability(current_device()));
}

KernelFn make_forward_by_cudnn(NodeSpec& spec) {
  KernelFn own =
      forward_too_wide(spec) ? make_forward<Way::tiles>(spec) : make_forward<Way::fragments>(spec);
  return attention_cudnn(spec, problem_of(spec, 0, 3), false, std::move(own));
}
KernelFn make_backward_by_cudnn(NodeSpec& spec) {
  KernelFn own = backward_too_wide(spec) ? make_backward<Way::tiles>(spec)
                                         : make_backward<Way::fragments>(spec);
  return attention_cudnn(spec, problem_of(spec, 1, 6), true, std::move(own));
}

}  // namespace

void register_attention(KernelRegistry& registry) {
  constexpr DTypeSet kHalfTypes{DType::f16, DType::bf16};
  registry.add("ortrain::Attention",
               {{.name = "cudnn",
                 .types = kHalfTypes,
                 .why_not = forward_not_by_cudnn,
                 .make = make_forward_by_cudnn},
                {.name = "fragments",
                 .types = kHalfTypes,
                 .why_not = forward_too_wide,
                 .make = make_forward<Way::fragments>},
                {.name = "tiles", .why_not = forward_too_large, .make = make_forward<Way::tiles>}});
  registry.add(
      "ortrain::AttentionGrad",
      {{.name = "cudnn",
        .types = kHalfTypes,
        .why_not = backward_not_by_cudnn,
        .make = make_backward_by_cudnn},
       {.name = "fragments",
        .types = kHalfTypes,
        .why_not = backward_too_wide,
        .make = make_backward<Way::fragments>},
       {.name = "tiles", .why_not = backward_too_large, .make = make_backward<Way::tiles>}});
}

}  // namespace ortrain::gpu
