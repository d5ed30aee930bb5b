// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/gpu/row_forms.h"

// Reductions over any axes. An Op has
//   In, Out, State         element types and what is kept of several elements (see merge.h)
//   State none()           of no element
//   void add(State&, C x, int64_t r)   element r of the `count` that one output reduces
//   State operator()(a, b) of both; in any order
//   Out finish(State, int64_t count)
namespace ortrain::gpu {

// The axes, neighbours of one fate merged and axes of extent 1 left out.
struct ReduceLayout {
  static constexpr int kMost = 8;
  DeviceArray<int64_t, kMost> kept_dims, kept_strides, reduced_dims, reduced_strides;
  int kept = 0, reduced = 0;
  int64_t outputs = 1, count = 1;

  // The offset of the first element of output o.
  ORTRAIN_DEVICE int64_t start(int64_t o) const { return offset(o, kept, kept_dims, kept_strides); }
  // From there to element r.
  ORTRAIN_DEVICE int64_t step(int64_t r) const {
    return offset(r, reduced, reduced_dims, reduced_strides);
  }
  // Neighbouring outputs whose elements lie side by side; 1 when those of one output do.
  int64_t inner() const {
    return kept > 0 && kept_strides[kept - 1] == 1 ? kept_dims[kept - 1] : 1;
  }
  // Whether elements of one output come in groups of `width` that start at multiples of it.
  bool in_packs(int64_t width) const {
    if (reduced == 0 || reduced_strides[reduced - 1] != 1) return false;
    bool fits = reduced_dims[reduced - 1] % width == 0;
    for (int k = 0; k < kept; ++k) fits &= kept_strides[k] % width == 0;
    for (int k = 0; k + 1 < reduced; ++k) fits &= reduced_strides[k] % width == 0;
    return fits;
  }
  // Whether neighbouring outputs have elements side by side in such groups.
  bool in_wide_columns(int64_t width) const {
    bool fits = inner() % width == 0;
    for (int k = 0; k + 1 < kept; ++k) fits &= kept_strides[k] % width == 0;
    for (int k = 0; k < reduced; ++k) fits &= reduced_strides[k] % width == 0;
    return fits;
  }

 private:
  ORTRAIN_DEVICE static int64_t offset(int64_t i, int axes, const DeviceArray<int64_t, kMost>& dims,
                                       const DeviceArray<int64_t, kMost>& strides) {
    if (axes == 0) return 0;
    int64_t sum = 0;
    for (int k = axes - 1; k > 0; --k) {
      sum += i % dims[k] * strides[k];
      i /= dims[k];
    }
    return sum + i * strides[0];
  }
};

// nullopt when the axes alternate too often.
inline std::optional<ReduceLayout> reduce_layout(const Dims& dims,
                                                 const std::vector<bool>& reduced) {
  ReduceLayout layout;
  Dims strides(dims.size(), 1);
  for (size_t k = dims.size(); k-- > 1;) strides[k - 1] = strides[k] * dims[k];
  std::optional<bool> previous;
  for (size_t k = 0; k < dims.size(); ++k) {
    (reduced[k] ? layout.count : layout.outputs) *= dims[k];
    if (dims[k] == 1) continue;
    int& axes = reduced[k] ? layout.reduced : layout.kept;
    auto& group_dims = reduced[k] ? layout.reduced_dims : layout.kept_dims;
    auto& group_strides = reduced[k] ? layout.reduced_strides : layout.kept_strides;
    if (previous == reduced[k]) {
      group_dims[axes - 1] *= dims[k];
      group_strides[axes - 1] = strides[k];
    } else {
      if (axes == ReduceLayout::kMost) return std::nullopt;
      group_dims[axes] = dims[k];
      group_strides[axes] = strides[k];
      ++axes;
    }
    previous = reduced[k];
  }
  return layout;
}

// What the blocks of a launch make: results, or states of a part of the elements, [part, output].
template <class Op>
struct ReduceTarget {
  typename Op::Out* out;
  typename Op::State* partial;  // null with one part
  int64_t parts;

  ORTRAIN_DEVICE void store(const Op& op, const ReduceLayout& a, int64_t o, int64_t part,
                            const typename Op::State& state) const {
    if (partial == nullptr) {
      out[o] = op.finish(state, a.count);
    } else {
      partial[part * a.outputs + o] = state;
    }
  }
  // The elements [begin, end) of a part; its size is a multiple of 16.
  ORTRAIN_DEVICE int64_t begin(const ReduceLayout& a, int64_t part) const {
    const int64_t size = ((a.count + parts - 1) / parts + 15) / 16 * 16;
    return part * size < a.count ? part * size : a.count;
  }
};

// A thread per output: few elements each.
template <class Op>
__global__ void reduce_by_thread(Op op, ReduceLayout a, const typename Op::In* x,
                                 ReduceTarget<Op> to) {
  using C = ComputeType<typename Op::In>;
  for_each_item(a.outputs, [&](int64_t o) {
    const int64_t start = a.start(o);
    typename Op::State state = op.none();
    for (int64_t r = 0; r < a.count; ++r) op.add(state, static_cast<C>(x[start + a.step(r)]), r);
    to.store(op, a, o, 0, state);
  });
}

// A block per output and part.
template <class Op, int kWidth>
__global__ void reduce_by_block(Op op, ReduceLayout a, const typename Op::In* x,
                                ReduceTarget<Op> to) {
  using C = ComputeType<typename Op::In>;
  const int64_t stride = int64_t{blockDim.x} * kWidth;
  for (int64_t o = blockIdx.x; o < a.outputs; o += gridDim.x) {
    const int64_t start = a.start(o), end = to.begin(a, blockIdx.y + 1);
    typename Op::State state = op.none();
    for (int64_t r = to.begin(a, blockIdx.y) + int64_t{threadIdx.x} * kWidth; r < end;
         r += stride) {
      const auto pack = load_pack<kWidth>(x + start + a.step(r));
      ORTRAIN_UNROLL
      for (int i = 0; i < kWidth; ++i) op.add(state, static_cast<C>(pack[i]), r + i);
    }
    state = block_merge(state, op.none(), op);
    if (threadIdx.x == 0) to.store(op, a, o, blockIdx.y, state);
  }
}

// Lanes on kWidth neighbouring outputs each, warps on elements. The order of an output's elements
// does not depend on kWidth.
inline constexpr int kColumnThreads = 8 * kWarpSize;

template <class Op, int kWidth>
__global__ void __launch_bounds__(kColumnThreads)
    reduce_columns(Op op, ReduceLayout a, int64_t inner, const typename Op::In* x,
                   ReduceTarget<Op> to) {
  using C = ComputeType<typename Op::In>;
  using Pack = RowPack<typename Op::In, kWidth>;
  constexpr int kAhead = 4;  // loads under way before the first is waited for
  constexpr int kTile = kWarpSize * kWidth;
  const int64_t tiles = (inner + kTile - 1) / kTile, warps = blockDim.x / kWarpSize;
  for (int64_t tile = blockIdx.x; tile < a.outputs / inner * tiles; tile += gridDim.x) {
    const int64_t column = tile % tiles * kTile + lane() * kWidth;
    const int64_t o = tile / tiles * inner + column;
    typename Op::State states[kWidth];
    ORTRAIN_UNROLL
    for (int i = 0; i < kWidth; ++i) states[i] = op.none();
    if (column < inner) {
      const typename Op::In* const from = x + a.start(o);
      const int64_t end = to.begin(a, blockIdx.y + 1);
      const auto add = [&](const Pack& pack, int64_t r) {
        ORTRAIN_UNROLL
        for (int i = 0; i < kWidth; ++i) op.add(states[i], static_cast<C>(pack[i]), r);
      };
      int64_t r = to.begin(a, blockIdx.y) + warp();
      for (; r + (kAhead - 1) * warps < end; r += kAhead * warps) {
        Pack packs[kAhead];
        ORTRAIN_UNROLL
        for (int k = 0; k < kAhead; ++k) packs[k] = load_pack<kWidth>(from + a.step(r + k * warps));
        ORTRAIN_UNROLL
        for (int k = 0; k < kAhead; ++k) add(packs[k], r + k * warps);
      }
      for (; r < end; r += warps) add(load_pack<kWidth>(from + a.step(r)), r);
    }
    if constexpr (sizeof(states) <= 64) {
      constexpr int kWarps = kColumnThreads / kWarpSize;
      merge_warps_of<kWarps>(states, op, [&](int i, const typename Op::State& state) {
        if (column < inner) to.store(op, a, o + i, blockIdx.y, state);
      });
    } else {  // more shared memory than is worth an exchange
      ORTRAIN_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        const typename Op::State state = merge_warps(states[i], op);
        if (warp() == 0 && column < inner) to.store(op, a, o + i, blockIdx.y, state);
      }
    }
  }
}

// The same for fewer outputs than lanes: a block's threads stand on several elements of each.
inline constexpr int kNarrowThreads = 256;

template <class Op>
__global__ void reduce_narrow_columns(Op op, ReduceLayout a, int inner, const typename Op::In* x,
                                      ReduceTarget<Op> to) {
  using C = ComputeType<typename Op::In>;
  __shared__ typename Op::State states[kNarrowThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const int rows = kNarrowThreads / inner, row = thread / inner, column = thread % inner;
  for (int64_t block = blockIdx.x; block < a.outputs / inner; block += gridDim.x) {
    typename Op::State state = op.none();
    if (row < rows) {
      const int64_t start = a.start(block * inner + column), end = to.begin(a, blockIdx.y + 1);
      for (int64_t r = to.begin(a, blockIdx.y) + row; r < end; r += rows) {
        op.add(state, static_cast<C>(x[start + a.step(r)]), r);
      }
    }
    states[thread] = state;
    __syncthreads();
    if (thread < inner) {
      for (int k = 1; k < rows; ++k) state = op(state, states[k * inner + thread]);
      to.store(op, a, block * inner + thread, blockIdx.y, state);
    }
    __syncthreads();
  }
}

// Joins the parts: lanes on outputs, warps on parts.
template <class Op>
__global__ void reduce_parts(Op op, ReduceLayout a, ReduceTarget<Op> to) {
  const int64_t o = int64_t{blockIdx.x} * kWarpSize + lane(), warps = blockDim.x / kWarpSize;
  typename Op::State state = op.none();
  if (o < a.outputs) {
    for (int64_t p = warp(); p < to.parts; p += warps) {
      state = op(state, to.partial[p * a.outputs + o]);
    }
  }
  state = merge_warps(state, op);
  if (warp() == 0 && o < a.outputs) to.out[o] = op.finish(state, a.count);
}

// How one reduction is run. kAllForms: more kernels, for the types whose speed matters.
template <class Op>
class ReduceLaunch {
 public:
  using In = typename Op::In;
  using State = typename Op::State;
  static constexpr bool kAllForms = sizeof(In) <= 4 && !std::is_integral_v<In>;

  ReduceLaunch(Op op, const ReduceLayout& layout) : op_(op), layout_(layout) {
    const int64_t inner = layout.inner(), outputs = layout.outputs, count = layout.count;
    constexpr int64_t kWantedBlocks = 512;
    int64_t blocks = outputs, grain = 8192;
    if (count <= 16 || (inner >= kWarpSize && outputs >= (1 << 16) && count <= 1024) ||
        (!kAllForms && inner > 1 && outputs >= 4096)) {
      form_ = Form::thread;
    } else if (!kAllForms || inner == 1) {
      form_ = Form::block;
    } else if (inner >= 16) {
      form_ = Form::columns;
      is_wide_ = layout.in_wide_columns(kPackWidth<In>);
      const int64_t tile = kWarpSize * (is_wide_ ? kPackWidth<In> : 1);
      blocks = outputs / inner * ((inner + tile - 1) / tile);
      grain = is_wide_ ? 32 : 128;  // four loads of each warp
    } else {
      form_ = Form::narrow;
      blocks = outputs / inner;
      grain = 8192 / inner;
    }
    if (form_ == Form::thread || blocks == 0) return;
    parts_ = std::clamp<int64_t>(std::min(count / grain, kWantedBlocks / blocks), 1, 1024);
  }

  ByteCount workspace_bytes() const {
    return parts_ == 1 ? ByteCount() : bytes_of<State>(parts_, layout_.outputs);
  }

  void operator()(const KernelArgs& args, const In* x, typename Op::Out* out,
                  void* workspace) const {
    const ReduceTarget<Op> to{out, parts_ == 1 ? nullptr : static_cast<State*>(workspace), parts_};
    const int64_t inner = layout_.inner();
    const auto blocks = [&](int64_t count) {
      return static_cast<unsigned>(std::min<int64_t>(count, 1 << 20));
    };
    LaunchShape shape{.blocks_y = static_cast<unsigned>(parts_)};
    const int64_t share = (layout_.count + parts_ - 1) / parts_;
    switch (form_) {
      case Form::thread:
        launch(reduce_by_thread<Op>, items(layout_.outputs), args.stream, op_, layout_, x, to);
        break;
      case Form::block: {
        shape.blocks = blocks(layout_.outputs);
        if constexpr (kAllForms) {
          constexpr int kWidth = kPackWidth<In>;
          if (layout_.in_packs(kWidth) && pack_aligned(x)) {
            shape.threads = row_threads(share, 2 * kWidth, 512);
            launch(reduce_by_block<Op, kWidth>, shape, args.stream, op_, layout_, x, to);
            break;
          }
        }
        shape.threads = row_threads(share, 4, 512);
        launch(reduce_by_block<Op, 1>, shape, args.stream, op_, layout_, x, to);
        break;
      }
      case Form::columns:
        if constexpr (kAllForms) {
          shape.threads = row_threads(share * kWarpSize, 8, kColumnThreads);
          const auto run = [&](auto kernel, int64_t width) {
            const int64_t tile = kWarpSize * width;
            shape.blocks = blocks(layout_.outputs / inner * ((inner + tile - 1) / tile));
            launch(kernel, shape, args.stream, op_, layout_, inner, x, to);
          };
          if (is_wide_ && pack_aligned(x)) {
            run(reduce_columns<Op, kPackWidth<In>>, kPackWidth<In>);
          } else {
            run(reduce_columns<Op, 1>, 1);
          }
        }
        break;
      case Form::narrow:
        if constexpr (kAllForms) {
          shape.blocks = blocks(layout_.outputs / inner);
          shape.threads = kNarrowThreads;
          launch(reduce_narrow_columns<Op>, shape, args.stream, op_, layout_,
                 static_cast<int>(inner), x, to);
        }
        break;
    }
    if (parts_ == 1) return;
    launch(reduce_parts<Op>,
           {.blocks = block_count((layout_.outputs + kWarpSize - 1) / kWarpSize),
            .threads = row_threads(parts_ * kWarpSize, 4, kMergedWarps * kWarpSize)},
           args.stream, op_, layout_, to);
  }

 private:
  enum class Form { thread, block, columns, narrow };
  Op op_;
  ReduceLayout layout_;
  Form form_ = Form::thread;
  bool is_wide_ = false;  // columns come in packs
  int64_t parts_ = 1;
};

}  // namespace ortrain::gpu
