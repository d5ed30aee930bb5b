// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/gpu/reduce.h"
#include "ortrain/gpu/strided_copy.h"
#include "ortrain/runtime/kernel_registry.h"

// Sums over some axes of a dense tensor. Each sum is cut into pieces by the shape alone, pieces are
// added in order: the same result in every run.
namespace ortrain::gpu {
namespace {

// Integers add up modulo 2^64.
template <class T>
using SumType = std::conditional_t<std::is_integral_v<T>, uint64_t, ComputeType<T>>;

constexpr int kThreads = 256;
constexpr int kLanes = 32;  // column vectors of a block; its other dimension goes down the rows
constexpr int kGroups = kThreads / kLanes;
// Blocks that keep any device busy.
constexpr int64_t kEnoughBlocks = 1024;
constexpr int64_t kMostPieces = 1024;

// Neighbouring axes of one fate merged.
struct SumLayout {
  Dims kept, kept_strides, summed, summed_strides;
  int64_t outputs = 1, terms = 1;
  bool columns = false;  // the innermost axis is kept

  explicit SumLayout(const NodeSpec& spec) {
    const Dims& from = spec.input(0).dims;
    const Dims& to = spec.output(0).dims;
    const Dims strides = strides_of(from);
    const size_t extra = from.size() - to.size();
    bool before = false;
    for (size_t k = 0; k < from.size(); ++k) {
      const bool sums = k < extra || to[k - extra] != from[k];
      (sums ? terms : outputs) *= from[k];
      if (from[k] == 1) continue;
      Dims& dims = sums ? summed : kept;
      Dims& steps = sums ? summed_strides : kept_strides;
      if (!dims.empty() && before == sums) {
        dims.back() *= from[k];
        steps.back() = strides[k];
      } else {
        dims.push_back(from[k]);
        steps.push_back(strides[k]);
      }
      before = sums;
      columns = !sums;
    }
  }
};

struct Sums {
  CopyAxes kept, summed;  // steps of the input only
  int64_t outputs, terms;
  int64_t piece;        // terms of a piece
  int64_t width;        // columns: extent of the innermost axis
  int64_t blocks_wide;  // columns: blocks side by side
};

CopyAxes axes_of(const Dims& dims, const Dims& strides) {
  CopyAxes axes;
  if (dims.size() > static_cast<size_t>(CopyAxes::kMost)) {
    throw UnsupportedError(str("sums over more than ", CopyAxes::kMost, " separate axes"));
  }
  for (size_t k = 0; k < dims.size(); ++k) {
    axes.axes[axes.count++] = {Divider(dims[k]), strides[k], 0};
  }
  return axes;
}

template <class Index>
ORTRAIN_DEVICE int64_t offset_of(const CopyAxes& axes, int64_t i) {
  int64_t in = 0, out = 0;
  axes.locate(static_cast<Index>(i), in, out);
  return in;
}

// Neighbouring threads have neighbouring columns, kVector each; groups of threads take every eighth
// row. blockIdx.y is the piece.
template <class T, int kVector, class Index>
__global__ void __launch_bounds__(kThreads)
    sum_columns(Sums s, const T* x, T* y, SumType<T>* partial) {
  using A = SumType<T>;
  __shared__ A shared[kThreads * kVector];
  const int lane_of_columns = static_cast<int>(threadIdx.x) % kLanes;
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t outer = blockIdx.x / s.blocks_wide;
  const int64_t column =
      ((blockIdx.x - outer * s.blocks_wide) * kLanes + lane_of_columns) * kVector;
  const int64_t begin = blockIdx.y * s.piece;
  const int64_t end = begin + s.piece < s.terms ? begin + s.piece : s.terms;
  Vector<A, kVector> sums = {};
  if (column < s.width) {
    const T* from = x + offset_of<Index>(s.kept, outer) + column;
#pragma unroll 4
    for (int64_t r = begin + group; r < end; r += kGroups) {
      const Vector<T, kVector> values = load_vector<kVector>(from + offset_of<Index>(s.summed, r));
      for (int k = 0; k < kVector; ++k) sums[k] += static_cast<A>(values[k]);
    }
  }
  for (int k = 0; k < kVector; ++k) shared[k * kThreads + static_cast<int>(threadIdx.x)] = sums[k];
  __syncthreads();
  // Each group now adds some of the columns.
  for (int k = group; k < kVector; k += kGroups) {
    A total = 0;
    for (int g = 0; g < kGroups; ++g) total += shared[k * kThreads + g * kLanes + lane_of_columns];
    if (column < s.width) {
      const int64_t at = outer * s.width + column + k;
      if (gridDim.y == 1) {
        y[at] = static_cast<T>(total);
      } else {
        partial[blockIdx.y * s.outputs + at] = total;
      }
    }
  }
}

// A block, or a warp, for each output and piece.
template <class T, int kVector, class Index, bool kWarps>
__global__ void sum_rows(Sums s, const T* x, T* y, SumType<T>* partial) {
  using A = SumType<T>;
  const int team = kWarps ? kWarpSize : static_cast<int>(blockDim.x);
  const int member = kWarps ? lane() : static_cast<int>(threadIdx.x);
  const int64_t output =
      kWarps ? int64_t{blockIdx.x} * (blockDim.x / kWarpSize) + warp() : int64_t{blockIdx.x};
  const int64_t begin = blockIdx.y * s.piece;
  const int64_t end = begin + s.piece < s.terms ? begin + s.piece : s.terms;
  A sum = 0;
  if (output < s.outputs) {
    const T* from = x + offset_of<Index>(s.kept, output);
#pragma unroll 4
    for (int64_t r = begin + int64_t{member} * kVector; r < end; r += int64_t{team} * kVector) {
      const Vector<T, kVector> values = load_vector<kVector>(from + offset_of<Index>(s.summed, r));
      for (int k = 0; k < kVector; ++k) sum += static_cast<A>(values[k]);
    }
  }
  sum = kWarps ? warp_reduce(sum, Sum()) : block_sum(sum);
  if (member != 0 || output >= s.outputs) return;
  if (gridDim.y == 1) {
    y[output] = static_cast<T>(sum);
  } else {
    partial[blockIdx.y * s.outputs + output] = sum;
  }
}

template <class T>
__global__ void __launch_bounds__(kItemThreads)
    add_pieces(int64_t outputs, int64_t pieces, const SumType<T>* partial, T* y) {
  for_each_item(outputs, [&](int64_t i) {
    SumType<T> sum = 0;
    for (int64_t p = 0; p < pieces; ++p) sum += partial[p * outputs + i];
    y[i] = static_cast<T>(sum);
  });
}

template <class T>
KernelFn sum_of(NodeSpec& spec, SumLayout layout) {
  using A = SumType<T>;
  constexpr int kMostVector = std::is_integral_v<T> ? 1 : 16 / static_cast<int>(sizeof(T));
  Sums s{};
  s.outputs = layout.outputs;
  s.terms = layout.terms;
  if (s.terms == 0 || s.outputs == 0) {
    return [bytes = s.outputs, size = sizeof(T)](const KernelArgs& args) {
      fill_elements(args.out[0], bytes, size, 0, args.stream);
    };
  }
  // Vectors lie along the innermost axis.
  Dims& run = layout.columns ? layout.kept : layout.summed;
  bool vectors = kMostVector > 1 && !run.empty() && run.back() % kMostVector == 0;
  for (const Dims* strides : {&layout.kept_strides, &layout.summed_strides}) {
    for (int64_t stride : *strides) vectors = vectors && (stride == 1 || stride % kMostVector == 0);
  }
  const int64_t width = vectors ? kMostVector : 1;
  s.width = 1;
  if (layout.columns) {
    s.width = layout.kept.back();
    layout.kept.pop_back();
    layout.kept_strides.pop_back();
  }
  s.kept = axes_of(layout.kept, layout.kept_strides);
  s.summed = axes_of(layout.summed, layout.summed_strides);

  LaunchShape shape{.threads = kThreads};
  int64_t least = 0;  // terms that are worth a piece
  bool warps = false;
  if (layout.columns) {
    s.blocks_wide = (s.width + kLanes * width - 1) / (kLanes * width);
    shape.blocks = block_count(s.outputs / s.width * s.blocks_wide);
    least = 16 * kGroups;
  } else {
    warps = s.terms <= 8 * kWarpSize * width;
    shape.blocks = block_count(
        warps ? (s.outputs + kThreads / kWarpSize - 1) / (kThreads / kWarpSize) : s.outputs);
    if (!warps) shape.threads = row_threads(s.terms, 4 * width, kThreads);
    least = 16 * kThreads * width;
  }
  int64_t pieces = std::min(kEnoughBlocks / std::max<int64_t>(shape.blocks, 1),
                            std::min(kMostPieces, s.terms / least));
  pieces = std::max<int64_t>(pieces, 1);
  s.piece = (s.terms + pieces - 1) / pieces;
  s.piece = (s.piece + width - 1) / width * width;
  pieces = (s.terms + s.piece - 1) / s.piece;
  shape.blocks_y = static_cast<unsigned>(pieces);
  if (pieces > 1) spec.request_workspace(bytes_of<A>(pieces, s.outputs));
  const int64_t elements = spec.input(0).numel();
  return [=, columns = layout.columns](const KernelArgs& args) {
    const T* x = args.input<T>(0);
    T* y = args.output<T>(0);
    A* partial = static_cast<A*>(args.workspace);
    const bool aligned = word_of_address(x) == 16;
    const auto run = [&](auto vector, auto index) {
      constexpr int kVector = decltype(vector)::value;
      using Index = decltype(index);
      auto* kernel = columns ? sum_columns<T, kVector, Index>
                     : warps ? sum_rows<T, kVector, Index, true>
                             : sum_rows<T, kVector, Index, false>;
      LaunchShape now = shape;
      Sums sums = s;
      if (columns && kVector != width) {  // an input that is less aligned than those of the plan
        sums.blocks_wide = (s.width + kLanes - 1) / kLanes;
        now.blocks = block_count(s.outputs / s.width * sums.blocks_wide);
      }
      launch(kernel, now, args.stream, sums, x, y, partial);
    };
    if constexpr (std::is_integral_v<T>) {
      run(std::integral_constant<int, 1>(), int64_t{});
    } else {
      dispatch_width(elements, [&](auto index) {
        if (width > 1 && aligned) {
          run(std::integral_constant<int, kMostVector>(), index);
        } else {
          run(std::integral_constant<int, 1>(), index);
        }
      });
    }
    if (pieces > 1) {
      launch(add_pieces<T>, items(s.outputs), args.stream, s.outputs, pieces, partial, y);
    }
  };
}

KernelFn make_sum_to_shape(NodeSpec& spec) {
  return dispatch_all(spec.input(0).dtype, [&](auto tag) -> KernelFn {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, bool>) {
      throw DTypeError("no kernel for element type bool");
    } else {
      return sum_of<T>(spec, SumLayout(spec));
    }
  });
}

std::optional<std::string> refuse_sum(const NodeSpec& spec) {
  return refusal_of([&] {
    const SumLayout layout(spec);
    axes_of(layout.kept, layout.kept_strides);
    axes_of(layout.summed, layout.summed_strides);
    if (needs_wide(layout.outputs)) throw UnsupportedError("2^31 sums or more");
  });
}

}  // namespace

void register_sum_to_shape(KernelRegistry& registry) {
  registry.add("ortrain::SumToShape",
               {{.name = "pieces", .why_not = refuse_sum, .make = make_sum_to_shape}});
}

}  // namespace ortrain::gpu
