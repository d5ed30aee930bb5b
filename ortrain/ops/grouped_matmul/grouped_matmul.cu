// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/gpu/gemm_tile.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/launch.h"
#include "ortrain/runtime/kernel_registry.h"

// One launch for all groups: where they end is known to the device alone. A small kernel in front
// checks the ends and counts the tiles of each group.
namespace ortrain::gpu {
namespace {

// The rows of x and what they are divided into, in the workspace: group e has the rows
// [ends[e - 1], ends[e]) and the tiles of rows [tiles[e], tiles[e + 1]). Group `count` has what is
// left over.
struct Groups {
  int64_t count = 0;
  int64_t rows = 0;
  int64_t* ends = nullptr;   // count + 1
  int64_t* tiles = nullptr;  // count + 2

  ByteCount workspace_bytes() const { return bytes_of<int64_t>(2, count) + bytes_of<int64_t>(3); }
  Groups in(void* workspace) const {
    Groups placed = *this;
    placed.ends = static_cast<int64_t*>(workspace);
    placed.tiles = placed.ends + count + 1;
    return placed;
  }
  ORTRAIN_DEVICE int64_t begin(int64_t e) const { return e == 0 ? 0 : ends[e - 1]; }
};

constexpr unsigned kPlanThreads = 256;

// One block. An end that is out of range counts as the nearest one that is not.
template <class I>
__global__ void plan_groups(const I* offsets, Groups groups, int tile_rows, FaultReporter faults) {
  __shared__ int64_t part[kPlanThreads];
  int64_t last = 0, tiles = 0;
  for (int64_t first = 0; first <= groups.count; first += kPlanThreads) {
    const int64_t mine = first + threadIdx.x;
    part[threadIdx.x] = mine < groups.count ? static_cast<int64_t>(offsets[mine]) : groups.rows;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int64_t e = first; e <= groups.count && e < first + kPlanThreads; ++e) {
        int64_t end = part[e - first];
        if (end < last || end > groups.rows) {
          faults.report(FaultKind::group_end, end, e, last, groups.rows);
          end = end < last ? last : groups.rows;
        }
        groups.tiles[e] = tiles;
        groups.ends[e] = end;
        tiles += (end - last + tile_rows - 1) / tile_rows;
        last = end;
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) groups.tiles[groups.count + 1] = tiles;
}

// Block x: a tile of rows and one of columns; `most_tiles` bounds the tiles of rows.
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    multiply_groups(Groups groups, int64_t most_tiles, MatrixView<T> x, MatrixView<T> w,
                    int64_t w_size, int64_t width, T* y) {
  __shared__ int64_t found;
  const int64_t row_tile = blockIdx.x % most_tiles;
  const int64_t column = blockIdx.x / most_tiles * Tile::kColumns;
  if (row_tile >= groups.tiles[groups.count + 1]) return;
  for (int64_t e = threadIdx.x; e <= groups.count; e += blockDim.x) {
    if (groups.tiles[e] <= row_tile && row_tile < groups.tiles[e + 1]) found = e;
  }
  __syncthreads();
  const int64_t e = found;
  const int64_t row = groups.begin(e) + (row_tile - groups.tiles[e]) * Tile::kRows;
  const int64_t end = groups.ends[e];
  const bool left_over = e == groups.count;
  x.rows = end;
  if (!left_over) w.data += e * w_size;
  Tile tile;
  tile.multiply(x, w, row, column, 0, left_over ? 0 : x.columns);
  tile.each_sum([&](int i, int j, typename Tile::Value sum) {
    if (row + i < end && column + j < width) {
      y[(row + i) * width + column + j] = static_cast<T>(sum);
    }
  });
}

// Block (x, y): a tile of dw and a group.
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    multiply_groups_transposed(Groups groups, MatrixView<T> x, MatrixView<T> dy, T* dw) {
  const int64_t tiles_across = (dy.columns + Tile::kColumns - 1) / Tile::kColumns;
  const int64_t row = blockIdx.x / tiles_across * Tile::kRows;
  const int64_t column = blockIdx.x % tiles_across * Tile::kColumns;
  Tile tile;
  for (int64_t e = blockIdx.y; e < groups.count; e += gridDim.y) {
    const int64_t begin = groups.begin(e), end = groups.ends[e];
    MatrixView<T> own_x = x, own_dy = dy;
    own_x.rows = own_dy.rows = end;
    tile.multiply(own_x, own_dy, row, column, begin, end);
    T* out = dw + e * x.columns * dy.columns;
    tile.each_sum([&](int i, int j, typename Tile::Value sum) {
      if (row + i < x.columns && column + j < dy.columns) {
        out[(row + i) * dy.columns + column + j] = static_cast<T>(sum);
      }
    });
  }
}

template <class T>
MatrixView<T> view(const void* data, int64_t rows, int64_t columns) {
  return {static_cast<const T*>(data), rows, columns, columns,
          reinterpret_cast<uintptr_t>(data) % 16 == 0 && columns * sizeof(T) % 16 == 0};
}

Groups groups_of(const NodeSpec& spec) {
  return {.count = spec.input(2).dims[0], .rows = spec.input(0).dims[0]};
}

// Puts the ends into the workspace.
Groups plan(const Groups& groups, DType index, int tile_rows, const KernelArgs& args) {
  const Groups placed = groups.in(args.workspace);
  dispatch_index(index, [&](auto tag) {
    using I = typename decltype(tag)::type;
    launch(plan_groups<I>, {.blocks = 1, .threads = kPlanThreads}, args.stream, args.input<I>(2),
           placed, tile_rows, FaultReporter(args));
  });
  return placed;
}

template <class T, class Tile>
KernelFn forward_by(const NodeSpec& spec) {
  const Groups groups = groups_of(spec);
  const int64_t depth = spec.input(0).dims[1], width = spec.output(0).dims[1];
  const bool transposed = spec.attrs().int_("trans_w") != 0;
  const int64_t tiles_across = (width + Tile::kColumns - 1) / Tile::kColumns;
  const int64_t most_tiles = groups.rows / Tile::kRows + std::min(groups.count + 1, groups.rows);
  return [=, index = spec.input(2).dtype](const KernelArgs& args) {
    const Groups placed = plan(groups, index, Tile::kRows, args);
    launch(multiply_groups<T, Tile>,
           {.blocks = block_count(most_tiles * tiles_across),
            .threads = Tile::kThreads,
            .shared_bytes = Tile::kSharedBytes},
           args.stream, placed, most_tiles, view<T>(args.in[0], groups.rows, depth),
           view<T>(args.in[1], transposed ? width : depth, transposed ? depth : width),
           depth * width, width, args.output<T>(0));
  };
}

template <class T, class Tile>
KernelFn weight_grad_by(const NodeSpec& spec) {
  const Groups groups = groups_of(spec);
  const int64_t depth = spec.input(0).dims[1], width = spec.input(1).dims[1];
  const int64_t tiles =
      (depth + Tile::kRows - 1) / Tile::kRows * ((width + Tile::kColumns - 1) / Tile::kColumns);
  return [=, index = spec.input(2).dtype](const KernelArgs& args) {
    const Groups placed = plan(groups, index, Tile::kRows, args);
    launch(multiply_groups_transposed<T, Tile>,
           {.blocks = block_count(tiles),
            .threads = Tile::kThreads,
            .shared_bytes = Tile::kSharedBytes,
            .blocks_y = static_cast<unsigned>(std::min<int64_t>(groups.count, 65535))},
           args.stream, placed, view<T>(args.in[0], groups.rows, depth),
           view<T>(args.in[1], groups.rows, width), args.output<T>(0));
  };
}

// Large tiles where they are filled and every multiprocessor gets one.
bool takes_large_tiles(int64_t down, int64_t across, int64_t groups) {
  constexpr int64_t kLargest = 128;
  return down > kLargest / 2 && across > kLargest / 2 &&
         (down + kLargest - 1) / kLargest * ((across + kLargest - 1) / kLargest) * groups >=
             multiprocessors(current_device());
}

// Each tile is a block; none is smaller than that.
constexpr int64_t kSmallTile = 64;

std::optional<std::string> too_many_tiles(int64_t down, int64_t across) {
  const int64_t tiles = down * ((across + kSmallTile - 1) / kSmallTile);
  if (has_blocks(tiles)) return std::nullopt;
  return str(tiles, " tiles");
}

std::optional<std::string> why_no_forward(const NodeSpec& spec) {
  const Groups groups = groups_of(spec);
  return too_many_tiles(groups.rows / kSmallTile + std::min(groups.count + 1, groups.rows),
                        spec.output(0).dims[1]);
}

std::optional<std::string> why_no_weight_grad(const NodeSpec& spec) {
  return too_many_tiles((spec.input(0).dims[1] + kSmallTile - 1) / kSmallTile,
                        spec.input(1).dims[1]);
}

template <class T, bool kLarge>
KernelFn forward_sized(const NodeSpec& spec) {
  return spec.attrs().int_("trans_w") != 0
             ? forward_by<T, typename TileOf<T, kLarge, false, true>::Type>(spec)
             : forward_by<T, typename TileOf<T, kLarge, false, false>::Type>(spec);
}

KernelFn make_forward(NodeSpec& spec) {
  const Groups groups = groups_of(spec);
  spec.request_workspace(groups.workspace_bytes());
  const int64_t each = groups.rows / std::max<int64_t>(groups.count, 1);
  const bool large = takes_large_tiles(each, spec.output(0).dims[1], groups.count);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) <= 4) {
      if (large) return forward_sized<T, true>(spec);
    }
    return forward_sized<T, false>(spec);
  });
}

KernelFn make_weight_grad(NodeSpec& spec) {
  const Groups groups = groups_of(spec);
  spec.request_workspace(groups.workspace_bytes());
  const bool large = takes_large_tiles(spec.input(0).dims[1], spec.input(1).dims[1], groups.count);
  return dispatch_float(spec.input(0).dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) <= 4) {
      if (large) return weight_grad_by<T, typename TileOf<T, true, true, false>::Type>(spec);
    }
    return weight_grad_by<T, typename TileOf<T, false, true, false>::Type>(spec);
  });
}

}  // namespace

void register_grouped_matmul(KernelRegistry& registry) {
  registry.add("ortrain::GroupedMatMul",
               {{.name = "tiles", .why_not = why_no_forward, .make = make_forward}});
  registry.add("ortrain::GroupedMatMulWeightGrad",
               {{.name = "tiles", .why_not = why_no_weight_grad, .make = make_weight_grad}});
}

}  // namespace ortrain::gpu
