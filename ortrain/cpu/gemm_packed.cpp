// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/gemm_packed.h"

#include <algorithm>
#include <type_traits>

#include "ortrain/cpu/scratch.h"
#include "ortrain/cpu/simd/gemm_kernels.h"
#include "ortrain/cpu/threads.h"

namespace ortrain::cpu {
namespace {

// Bounds of one packed block, chosen so that a panel of B and a few panels of A stay in L2.
constexpr int64_t kDepthBytes = 1536;
constexpr int64_t kBlockRows = 2048;
constexpr int64_t kBlockCols = 4096;
constexpr int64_t kTilePanels = 6;
// Below this many multiply-adds, waking the other threads costs more than it gains.
constexpr int64_t kSerialWork = 200'000;

template <class T>
GemmKernels<T> kernels() {
  if constexpr (std::is_same_v<T, float>) {
    return gemm_kernels_f32();
  } else {
    return gemm_kernels_f64();
  }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

const void* at(const void* base, Storage storage, int64_t offset) {
  return static_cast<const char*>(base) + offset * storage_size(storage);
}

template <class T>
void scale_only(const PackedGemm<T>& g) {
  for (int64_t i = 0; i < g.m; ++i) {
    for (int64_t j = 0; j < g.n; ++j) {
      T value = g.bias == nullptr ? T{0} : g.bias[j];
      T& c = g.c[i * g.ldc + j];
      if (g.beta != T{0}) value += g.beta * c;
      c = value;
    }
  }
}

// Packs `count` rows of op(X), from (row, depth0), into panels of `width` rows.
template <class T>
struct Operand {
  const void* data;
  Storage storage;
  int64_t ld;
  bool contiguous;  // in the direction of the depth
  int64_t width;

  void pack_panel(const GemmKernels<T>& k, int64_t row, int64_t count, int64_t depth0,
                  int64_t depth, T* packed) const {
    const int64_t offset = contiguous ? row * ld + depth0 : depth0 * ld + row;
    auto pack = contiguous ? k.pack_contiguous : k.pack_strided;
    pack(at(data, storage, offset), storage, ld, count, depth, width, packed);
  }
};

template <class T>
class PackedRun {
 public:
  explicit PackedRun(const PackedGemm<T>& gemm)
      : g_(gemm),
        k_(kernels<T>()),
        a_{g_.a, g_.a_storage, g_.lda, !g_.trans_a, k_.panel_rows},
        b_{g_.b, g_.b_storage, g_.ldb, g_.trans_b, k_.panel_cols},
        serial_(g_.m * g_.n * g_.k < kSerialWork || thread_count() == 1) {}

  void run() {
    const int64_t depth_limit = kDepthBytes / static_cast<int64_t>(sizeof(T));
    const int64_t depth_blocks = ceil_div(g_.k, depth_limit);
    const int64_t depth_step = ceil_div(ceil_div(g_.k, depth_blocks), 8) * 8;
    // Rows of B that few panels of A read are used where they lie.
    const bool b_wide = g_.b_storage == Storage::kF32 || g_.b_storage == Storage::kF64;
    direct_b_ = !g_.trans_b && b_wide && g_.m <= 2 * k_.panel_rows;
    for (int64_t j = 0; j < g_.n; j += kBlockCols) {
      for (int64_t i = 0; i < g_.m; i += kBlockRows) {
        for (int64_t p = 0; p < g_.k; p += depth_step) {
          block(i, std::min(kBlockRows, g_.m - i), j, std::min(kBlockCols, g_.n - j), p,
                std::min(depth_step, g_.k - p));
        }
      }
    }
  }

 private:
  template <class Fn>
  void each(int64_t blocks, Fn&& fn) {
    if (serial_) {
      for (int64_t block = 0; block < blocks; ++block) fn(block);
    } else {
      parallel_blocks(blocks, fn);
    }
  }

  void block(int64_t row, int64_t rows, int64_t col, int64_t cols, int64_t depth0, int64_t depth) {
    const int64_t a_panels = ceil_div(rows, k_.panel_rows);
    const int64_t b_panels = ceil_div(cols, k_.panel_cols);
    const int64_t a_size = k_.panel_rows * depth;
    const int64_t b_size = k_.panel_cols * depth;
    T* packed_a = scratch<T>(ScratchSlot::kGemmA, a_panels, a_size);
    T* packed_b = scratch<T>(ScratchSlot::kGemmB, direct_b_ ? 1 : b_panels, b_size);
    const int64_t full_panels = cols / k_.panel_cols;

    // Several panels per task, or the hand-out itself would show.
    const int64_t first_b = direct_b_ ? full_panels : 0;
    const int64_t panels = a_panels + b_panels - first_b;
    const int64_t task = std::max<int64_t>(1, panels / (4 * thread_count()));
    each(ceil_div(panels, task), [&](int64_t t) {
      for (int64_t panel = t * task; panel < std::min(panels, (t + 1) * task); ++panel) {
        if (panel < a_panels) {
          const int64_t i = panel * k_.panel_rows;
          a_.pack_panel(k_, row + i, std::min(k_.panel_rows, rows - i), depth0, depth,
                        packed_a + panel * a_size);
        } else {
          const int64_t index = panel - a_panels + first_b;
          const int64_t j = index * k_.panel_cols;
          b_.pack_panel(k_, col + j, std::min(k_.panel_cols, cols - j), depth0, depth,
                        packed_b + (index - first_b) * b_size);
        }
      }
    });

    const int64_t tile_rows = kTilePanels * k_.panel_rows;
    const int64_t row_tiles = ceil_div(rows, tile_rows);
    const int64_t wanted = serial_ ? 1 : 4 * thread_count();
    const int64_t col_tiles = std::clamp<int64_t>(ceil_div(wanted, row_tiles), 1, b_panels);
    const int64_t tile_panels = ceil_div(b_panels, col_tiles);
    each(row_tiles * ceil_div(b_panels, tile_panels), [&](int64_t t) {
      const int64_t i = t % row_tiles * tile_rows;
      const int64_t panel = t / row_tiles * tile_panels;
      const int64_t j = panel * k_.panel_cols;
      GemmTile<T> tile;
      tile.rows = std::min(tile_rows, rows - i);
      tile.cols = std::min(tile_panels * k_.panel_cols, cols - j);
      tile.depth = depth;
      tile.alpha = g_.alpha;
      tile.beta = depth0 == 0 ? g_.beta : T{1};
      tile.a = packed_a + i * depth;
      if (direct_b_) {
        tile.b = static_cast<const T*>(g_.b) + depth0 * g_.ldb + col + j;
        tile.b_panel = k_.panel_cols;
        tile.b_stride = g_.ldb;
        tile.b_edge = packed_b;
      } else {
        tile.b = packed_b + panel * b_size;
        tile.b_panel = b_size;
        tile.b_stride = k_.panel_cols;
        tile.b_edge = packed_b + full_panels * b_size;
      }
      tile.c = g_.c + (row + i) * g_.ldc + col + j;
      tile.ldc = g_.ldc;
      tile.bias = depth0 == 0 && g_.bias != nullptr ? g_.bias + col + j : nullptr;
      k_.run(tile);
    });
  }

  const PackedGemm<T>& g_;
  const GemmKernels<T> k_;
  const Operand<T> a_;
  const Operand<T> b_;
  const bool serial_;
  bool direct_b_ = false;
};

// Few columns or few rows: every element of the large operand is used that few times, so packing it
// would double the memory traffic.
template <class T>
bool run_as_dots(const PackedGemm<T>& g) {
  const Storage native = std::is_same_v<T, float> ? Storage::kF32 : Storage::kF64;
  if (g.a_storage != native || g.b_storage != native) return false;
  const bool few_rows = g.trans_b && g.m <= GemmDots<T>::kMost;
  const bool few_cols = !g.trans_a && g.n <= GemmDots<T>::kMost;
  if (!few_rows && !few_cols) return false;

  const T* a = static_cast<const T*>(g.a);
  const T* b = static_cast<const T*>(g.b);
  GemmDots<T> dots;
  dots.depth = g.k;
  dots.alpha = g.alpha;
  dots.beta = g.beta;
  dots.c = g.c;
  dots.bias = g.bias;
  // The few vectors must be contiguous; gather them where they are not.
  const T* few = few_rows ? a : b;
  int64_t few_stride = few_rows ? g.lda : g.ldb;
  const int64_t count = few_rows ? g.m : g.n;
  if (few_rows ? g.trans_a : !g.trans_b) {
    T* gathered = scratch<T>(ScratchSlot::kGemmA, count, g.k);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t p = 0; p < g.k; ++p) gathered[i * g.k + p] = few[p * few_stride + i];
    }
    few = gathered;
    few_stride = g.k;
  }
  dots.y = few;
  dots.y_stride = few_stride;
  dots.y_rows = count;
  dots.x = few_rows ? b : a;
  dots.x_stride = few_rows ? g.ldb : g.lda;
  dots.x_rows = few_rows ? g.n : g.m;
  dots.c_x_stride = few_rows ? 1 : g.ldc;
  dots.c_y_stride = few_rows ? g.ldc : 1;
  dots.bias_x_stride = few_rows ? 1 : 0;
  dots.bias_y_stride = few_rows ? 0 : 1;

  const auto run = kernels<T>().dots;
  const int64_t grain = std::max<int64_t>(1, kSerialWork / (count * std::max<int64_t>(g.k, 1)));
  parallel_for(dots.x_rows, grain, [&](int64_t begin, int64_t end) {
    GemmDots<T> part = dots;
    part.x += begin * dots.x_stride;
    part.c += begin * dots.c_x_stride;
    if (part.bias != nullptr) part.bias += begin * dots.bias_x_stride;
    part.x_rows = end - begin;
    run(part);
  });
  return true;
}

template <class T>
void run_gemm(const PackedGemm<T>& g) {
  if (g.m <= 0 || g.n <= 0) return;
  if (g.k <= 0) {
    scale_only(g);
    return;
  }
  if (run_as_dots(g)) return;
  PackedRun<T>(g).run();
}

}  // namespace

void gemm_packed(const PackedGemm<float>& gemm) { run_gemm(gemm); }
void gemm_packed(const PackedGemm<double>& gemm) { run_gemm(gemm); }

}  // namespace ortrain::cpu
