// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <vector>

#include "ortrain/gpu/column_sums.h"
#include "ortrain/gpu/gemm.h"
#include "ortrain/gpu/gemm_padded.h"
#include "ortrain/gpu/padded_copy.h"
#include "ortrain/ops/loss/cross_entropy_rows.cuh"
#include "ortrain/runtime/kernel_registry.h"

// The gradient of the logits is made for some rows at a time and multiplied at once. How many
// labels count is known on the device only, so rows without one take part, as zeros.
//
// What that takes beside the results: the gradient of 2048 rows of logits; in the 16-bit types the
// weight gradient in float as well, in which the chunks add up before they are rounded once. Where
// that is more than the gradient of all rows, these are one chunk. So no length of a batch takes
// more than C * (2048 * size of the type + 4 K) bytes, and some for the bias and the products.
// Where rows of C begin anywhere, as C is odd, and it pays, a copy of the weight with rows of zeros
// takes C * K * size of the type more: then all products run along whole vectors.
namespace ortrain::gpu {
namespace {

// Enough for products to fill a device, while their logits stay small beside those of a long batch.
constexpr int64_t kMostChunkRows = 2048;
// Of one part of a bias gradient.
constexpr int64_t kLeastPartRows = 64, kMostParts = 256;
constexpr size_t kBase = 6;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr size_t kWorkspaceUnit = 64;

// The gradients of the scores of labels [begin, begin + rows), side by side in dx, whose rows lie
// `stride` apart; zeros in between.
template <class T, class Form>
__global__ void __launch_bounds__(Form::Team::kThreads)
    classifier_loss_rows(ClassLossGrad<T> a, int64_t begin, int64_t rows, int64_t stride) {
  const int64_t n = a.classes;
  const LossSums weights = a.all_weights();
  for (int64_t row = Form::Team::index(); row < rows; row += Form::Team::count()) {
    T* to = a.dx + row * stride;
    class_loss_grad_row<T, Form>(a, weights, begin + row, a.x + (begin + row) * n, to,
                                 a.x + (begin + rows) * n);
    // A ragged row's last pack has zeros behind it.
    const int64_t filled = Form::kRagged ? (n + Form::kWidth - 1) / Form::kWidth * Form::kWidth : n;
    for (int64_t k = filled + Form::Team::rank(); k < stride; k += Form::Team::size()) {
      to[k] = static_cast<T>(ComputeType<T>{0});
    }
  }
}

// parts[p][j] = the sum of column j < n over the rows of part p = blockIdx.y. Rows start at
// multiples of 16 bytes.
template <class T>
__global__ void __launch_bounds__(kSumWarps* kWarpSize)
    sum_row_parts(const T* from, int64_t rows, int64_t n, int64_t stride, int64_t part_rows,
                  ComputeType<T>* parts) {
  using C = ComputeType<T>;
  constexpr int kWidth = kPackWidth<T>;
  const int64_t column = (int64_t{blockIdx.x} * kWarpSize + lane()) * kWidth;
  const int64_t begin = blockIdx.y * part_rows;
  const int64_t end = begin + part_rows < rows ? begin + part_rows : rows;
  C sums[kWidth] = {};
  if (column < n) {
    for (int64_t row = begin + warp(); row < end; row += blockDim.x / kWarpSize) {
      const auto pack = load_pack<kWidth>(from + row * stride + column);
      ORTRAIN_UNROLL
      for (int j = 0; j < kWidth; ++j) sums[j] += static_cast<C>(pack[j]);
    }
  }
  ORTRAIN_UNROLL
  for (int j = 0; j < kWidth; ++j) {
    const C sum = merge_warps(sums[j], Sum());
    if (warp() == 0 && column + j < n) parts[blockIdx.y * n + column + j] = sum;
  }
}

// to = sums + base, which may be null, rounded.
template <class T>
__global__ void round_sums(const float* sums, const T* base, int64_t count, T* to) {
  for_each_item(count, [&](int64_t i) {
    to[i] = static_cast<T>(base == nullptr ? sums[i] : sums[i] + static_cast<float>(base[i]));
  });
}

// The products of some rows; absent where nobody wants them.
struct Chunk {
  int64_t begin, rows;
  bool adds;  // to the weight gradient of the chunks before, or at once to base
  std::optional<Gemm> dx, dweight;
  std::optional<Gemm> odd_dweight;  // the rows behind those that `dweight` makes
};

struct ClassifierLoss {
  ClassRows rows;
  ClassLossGradPlan gradient;
  DType dtype;
  int64_t features;
  int64_t stride;  // of rows of the logits' gradient: whole 16 bytes, for fast products
  int64_t even;    // classes whose rows of the weight gradient are made at once
  bool pads;       // the weight, with rows of zeros up to `stride`
  int64_t part_rows;
  bool wants_dx, wants_dweight, wants_dbias, has_base;
  bool sums_in_float = false;  // the weight gradient
  std::vector<Chunk> chunks;
  ByteCount logit_bytes, sum_bytes, padded_bytes, gemm_bytes;
  int64_t parts = 0;  // of the bias gradient

  explicit ClassifierLoss(const NodeSpec& spec)
      : rows(spec, spec.input(1).dims, 2),
        gradient(spec, rows, false),
        dtype(spec.input(1).dtype),
        features(spec.input(4).dims.back()),
        part_rows(std::max(kLeastPartRows, ceil_div(rows.outer, kMostParts))),
        wants_dx(spec.has_output(0)),
        wants_dweight(spec.has_output(1)),
        wants_dbias(spec.has_output(2)),
        has_base(spec.has_input(kBase)) {
    stride = padded_extent(rows.classes, static_cast<int64_t>(size_of(dtype)));
    const bool is_odd = stride > rows.classes && vectors_pay();
    pads = is_odd && wants_dx;
    if (pads) {
      padded_bytes = ByteCount::of(size_of(dtype), stride, features).rounded_up(kWorkspaceUnit);
    }
    const int64_t size = chunk_rows();
    if (size < rows.outer && wants_dweight && size_of(dtype) == 2) {
      sums_in_float = true;
      sum_bytes = bytes_of<float>(stride, features).rounded_up(kWorkspaceUnit);
    }
    const int64_t pack = 16 / static_cast<int64_t>(size_of(dtype));
    // Sums have room for the rows of padding, which are zeros.
    even = sums_in_float ? stride : is_odd ? rows.classes / pack * pack : rows.classes;
    if (even == 0) even = rows.classes;
    // Without rows, too: the weight gradient is written.
    for (int64_t begin = 0; begin == 0 || begin < rows.outer; begin += size) add_chunk(begin, size);
    logit_bytes = ByteCount::of(size_of(dtype), chunks[0].rows, stride).rounded_up(kWorkspaceUnit);
  }

  // Both products against a copy of the weight, and one more for what is left of the classes.
  bool vectors_pay() const {
    const auto weights = static_cast<double>(rows.classes * features);
    const auto size = static_cast<double>(size_of(dtype));
    return padding_pays(4 * weights * static_cast<double>(rows.outer), static_cast<int>(size),
                        2 * weights * size, 2, dtype);
  }

  int64_t chunk_rows() const {
    if (rows.outer <= kMostChunkRows) return std::max<int64_t>(rows.outer, 1);
    const int64_t equal = ceil_div(rows.outer, ceil_div(rows.outer, kMostChunkRows));
    const int64_t size = ceil_div(equal, kLeastPartRows) * kLeastPartRows;
    if (size_of(dtype) > 2 || !wants_dweight) return size;
    const auto float_bytes = static_cast<int64_t>(sizeof(float)) * rows.classes * features;
    return (rows.outer - size) * stride * 2 > float_bytes ? size : rows.outer;
  }

  void add_chunk(int64_t begin, int64_t size) {
    const int64_t count = std::min(size, rows.outer - begin);
    const bool adds = (has_base && !sums_in_float) || begin > 0;
    parts += ceil_div(count, part_rows);
    if (!chunks.empty() && chunks.back().rows == count && chunks.back().adds == adds) {
      chunks.push_back(chunks.back());
      chunks.back().begin = begin;
      return;
    }
    Chunk chunk{.begin = begin, .rows = count, .adds = adds, .dx = {}, .dweight = {}};
    if (wants_dx) {
      chunk.dx.emplace(GemmProblem{.dtype = dtype,
                                   .m = count,
                                   .n = features,
                                   .k = pads ? stride : rows.classes,
                                   .lda = stride});
      gemm_bytes = std::max(gemm_bytes, chunk.dx->workspace_bytes());
    }
    if (wants_dweight) {
      GemmProblem problem{.dtype = dtype,
                          .m = even,
                          .n = features,
                          .k = count,
                          .trans_a = true,
                          .lda = stride,
                          .beta = adds ? 1.0 : 0.0,
                          .keep_sums = sums_in_float};
      chunk.dweight.emplace(problem);
      gemm_bytes = std::max(gemm_bytes, chunk.dweight->workspace_bytes());
      if (even < rows.classes) {
        problem.m = rows.classes - even;
        chunk.odd_dweight.emplace(problem);
        gemm_bytes = std::max(gemm_bytes, chunk.odd_dweight->workspace_bytes());
      }
    }
    chunks.push_back(std::move(chunk));
  }

  // The workspace: weights of labels, gradients of logits, parts of dbias, sums of dweight, the
  // padded weight, that of products.
  ByteCount weight_bytes() const { return gradient.bytes().rounded_up(kWorkspaceUnit); }
  ByteCount part_bytes() const {
    if (!wants_dbias) return {};
    const size_t size = dtype == DType::f64 ? sizeof(double) : sizeof(float);
    return ByteCount::of(size, parts, rows.classes).rounded_up(kWorkspaceUnit);
  }
  ByteCount bytes() const {
    return weight_bytes() + logit_bytes + part_bytes() + sum_bytes + padded_bytes + gemm_bytes;
  }
};

// The gradient of the chunk's logits.
template <class T>
void launch_rows(const ClassifierLoss& loss, const ClassLossGrad<T>& grad, const Chunk& chunk,
                 void* stream) {
  const int64_t classes = loss.rows.classes;
  // The rows of dx begin at multiples of 16 bytes.
  with_ragged_row_form<T>(classes, pack_aligned(grad.x, grad.dx), [&](auto form) {
    using Form = decltype(form);
    launch(classifier_loss_rows<T, Form>, row_shape<Form>(chunk.rows, classes), stream, grad,
           chunk.begin, chunk.rows, loss.stride);
  });
}

// Its sums over parts of the rows; returns how many.
template <class T>
int64_t launch_parts(const ClassifierLoss& loss, const T* dlogits, const Chunk& chunk,
                     ComputeType<T>* parts, void* stream) {
  const int64_t count = ceil_div(chunk.rows, loss.part_rows);
  launch(sum_row_parts<T>,
         {.blocks = block_count(ceil_div(loss.stride, kPackWidth<T> * kWarpSize)),
          .threads = kSumWarps * kWarpSize,
          .blocks_y = static_cast<unsigned>(count)},
         stream, dlogits, chunk.rows, loss.rows.classes, loss.stride, loss.part_rows, parts);
  return count;
}

template <class T>
void run(const ClassifierLoss& loss, const KernelArgs& args) {
  using C = ComputeType<T>;
  char* memory = static_cast<char*>(args.workspace) + loss.weight_bytes().value();
  T* dlogits = reinterpret_cast<T*>(memory);
  C* parts = reinterpret_cast<C*>(memory += loss.logit_bytes.value());
  auto* sums = reinterpret_cast<float*>(memory += loss.part_bytes().value());
  void* const padded = memory += loss.sum_bytes.value();
  void* gemm_workspace = memory + loss.padded_bytes.value();
  const ClassLossGrad<T> grad =
      loss.gradient.grad<T>(args, args.input<C>(3), static_cast<const T*>(nullptr), dlogits);
  loss.gradient.launch_weights(args, grad);
  const T* base = loss.has_base ? args.input<T>(kBase) : nullptr;
  void* const dweight = loss.sums_in_float ? static_cast<void*>(sums) : args.out[1];
  const void* before = loss.sums_in_float ? nullptr : base;
  if (loss.pads) {
    copy_padded({.from_rows = loss.rows.classes,
                 .from_columns = loss.features,
                 .from_ld = loss.features,
                 .rows = loss.stride,
                 .columns = loss.features,
                 .to_ld = loss.features},
                sizeof(T), args.in[5], padded, args.stream);
  }
  int64_t part = 0;
  for (const Chunk& chunk : loss.chunks) {
    launch_rows(loss, grad, chunk, args.stream);
    if (loss.wants_dbias) {
      part += launch_parts(loss, dlogits, chunk, parts + part * loss.rows.classes, args.stream);
    }
    const int64_t at = chunk.begin * loss.features;
    if (chunk.dweight) {
      const T* x = args.input<T>(4) + at;
      chunk.dweight->run({.a = dlogits, .b = x, .d = dweight, .c = before}, gemm_workspace,
                         args.stream);
      if (chunk.odd_dweight) {  // in T, as sums in float have no rest
        const int64_t bytes = loss.even * loss.features * static_cast<int64_t>(sizeof(T));
        chunk.odd_dweight->run({.a = dlogits + loss.even,
                                .b = x,
                                .d = moved(dweight, bytes),
                                .c = moved(before, bytes)},
                               gemm_workspace, args.stream);
      }
      before = dweight;
    }
    if (chunk.dx) {
      chunk.dx->run(
          {.a = dlogits, .b = loss.pads ? padded : args.in[5], .d = args.output<T>(0) + at},
          gemm_workspace, args.stream);
    }
  }
  if (loss.sums_in_float) {
    const int64_t count = loss.rows.classes * loss.features;
    launch(round_sums<T>, items(count), args.stream, static_cast<const float*>(sums), base, count,
           args.output<T>(1));
  }
  if (loss.wants_dbias) {
    launch_sum_parts<T, 1>(args.stream, parts, part, loss.rows.classes, {{args.output<T>(2)}});
  }
}

KernelFn make_classifier_loss(NodeSpec& spec) {
  const ClassifierLoss loss(spec);
  spec.request_workspace(loss.bytes());
  return dispatch_float(loss.dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    return [loss](const KernelArgs& args) { run<T>(loss, args); };
  });
}

}  // namespace

void register_classifier_loss(KernelRegistry& registry) {
  registry.add("ortrain::ClassifierLossGrad",
               {{.name = "chunks", .make = make_classifier_loss, .inplace = {{kBase, 1}}}});
}

}  // namespace ortrain::gpu
