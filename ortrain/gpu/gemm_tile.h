// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ortrain/gpu/async_copy.h"
#include "ortrain/gpu/matrix_fragment.h"

// The product of one tile of a matrix product by one block: parts of both factors go through shared
// memory in stages, sums stay in registers.
namespace ortrain::gpu {

// A matrix in memory, [rows, columns], row-major.
template <class T>
struct MatrixView {
  const T* data = nullptr;
  int64_t rows = 0, columns = 0, ld = 0;
  // Every row begins at a multiple of 16 bytes.
  bool vectors = false;
};

// Part of a matrix in shared memory. What lies outside of the matrix is 0. Rows are 16 bytes longer
// than their values, so that columns spread over the banks.
template <class T, int kRows, int kColumns, int kThreads>
struct SharedTile {
  static constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  static constexpr int kLd = kColumns + kVector;
  static constexpr int kSize = kRows * kLd;

  ORTRAIN_DEVICE static void load(T* tile, const MatrixView<T>& from, int64_t first_row,
                                  int64_t first_column) {
    constexpr int kPerRow = kColumns / kVector;
    constexpr int kChunks = kRows * kPerRow;
    const int rows = inside(from.rows - first_row, kRows);
    const int columns = inside(from.columns - first_column, kColumns);
    const T* corner = from.data + first_row * from.ld + first_column;
    ORTRAIN_UNROLL
    for (int at = 0; at < kChunks; at += kThreads) {
      const int chunk = at + static_cast<int>(threadIdx.x);
      if (kChunks % kThreads != 0 && chunk >= kChunks) break;
      const int row = chunk / kPerRow, column = chunk % kPerRow * kVector;
      T* to = tile + row * kLd + column;
      const T* source = corner + row * from.ld + column;
      if (from.vectors && row < rows && column + kVector <= columns) {
        copy_16_bytes(to, source);
        continue;
      }
      ORTRAIN_ROLL
      for (int e = 0; e < kVector; ++e) {
        to[e] = row < rows && column + e < columns ? source[e] : T{};
      }
    }
  }

  ORTRAIN_DEVICE static int inside(int64_t left, int extent) {
    return left < extent ? static_cast<int>(left) : extent;
  }
};

template <class T>
struct alignas(16) Vector16 {
  T values[16 / sizeof(T)];
};

// Tiles of kM x kN with the factors' parts of kK: what both kinds below have in common. kTransA: A
// is stored [k, m]; kTransB: B is stored [n, k].
template <class T, int kM, int kN, int kK, int kThreadCount, int kStageCount, bool kTransA,
          bool kTransB>
struct StagedTile {
  static constexpr int kRows = kM, kColumns = kN, kDepth = kK;
  static constexpr int kThreads = kThreadCount, kStages = kStageCount;
  using PartA = SharedTile<T, kTransA ? kK : kM, kTransA ? kM : kK, kThreads>;
  using PartB = SharedTile<T, kTransB ? kN : kK, kTransB ? kK : kN, kThreads>;
  static constexpr size_t kSharedBytes = sizeof(T) * kStages * (PartA::kSize + PartB::kSize);

  // Calls step(part of A, part of B) for the inner positions [begin, end), begin a multiple of kK;
  // those behind `end` count as 0 only where the matrices end.
  template <class Step>
  ORTRAIN_DEVICE static void run(const MatrixView<T>& a, const MatrixView<T>& b, int64_t row,
                                 int64_t column, int64_t begin, int64_t end, const Step& step) {
    T* parts_a = dynamic_shared<T>();
    T* parts_b = parts_a + kStages * PartA::kSize;
    const int64_t count = (end - begin + kK - 1) / kK;
    const auto load = [&](int64_t t) {
      if (t < count) {
        const int stage = static_cast<int>(t % kStages);
        const int64_t q = begin + t * kK;
        PartA::load(parts_a + stage * PartA::kSize, a, kTransA ? q : row, kTransA ? row : q);
        PartB::load(parts_b + stage * PartB::kSize, b, kTransB ? column : q, kTransB ? q : column);
      }
      end_copy_group();
    };
    for (int t = 0; t < kStages - 1; ++t) load(t);
    for (int64_t t = 0; t < count; ++t) {
      wait_for_copies<kStages - 2>();
      // Part t is seen by all, and nobody reads part t - 1 any more.
      __syncthreads();
      load(t + kStages - 1);
      const int stage = static_cast<int>(t % kStages);
      step(parts_a + stage * PartA::kSize, parts_b + stage * PartB::kSize);
    }
    wait_for_copies<0>();
    __syncthreads();
  }
};

#if defined(__HIPCC__)
inline constexpr int kTensorStages = 2;  // 64 KiB of shared memory, no copies on the side
#else
inline constexpr int kTensorStages = 3;
#endif

// By matrix units, float16 and bfloat16: each warp has kWarpM x kWarpN of the tile.
template <class T, int kM, int kN, int kWarpM, int kWarpN, bool kTransA, bool kTransB>
class TensorTile : public StagedTile<T, kM, kN, 32, kM / kWarpM*(kN / kWarpN) * kWarpSize,
                                     kTensorStages, kTransA, kTransB> {
  using Base = StagedTile<T, kM, kN, 32, kM / kWarpM*(kN / kWarpN) * kWarpSize, kTensorStages,
                          kTransA, kTransB>;
  static constexpr int kDown = kWarpM / 16, kAcross = kWarpN / 16;
  static constexpr int kSlabLd = kWarpN + 4;
  static_assert(Base::kThreads / kWarpSize * 16 * kSlabLd * sizeof(float) <= Base::kSharedBytes);

 public:
  using Value = float;

  ORTRAIN_DEVICE void multiply(const MatrixView<T>& a, const MatrixView<T>& b, int64_t row,
                               int64_t column, int64_t begin, int64_t end) {
    ORTRAIN_UNROLL
    for (int i = 0; i < kDown; ++i) {
      ORTRAIN_UNROLL
      for (int j = 0; j < kAcross; ++j) sums_[i][j].fill(0.0f);
    }
    Base::run(a, b, row, column, begin, end, [&](const T* part_a, const T* part_b) {
      ORTRAIN_UNROLL
      for (int q = 0; q < Base::kDepth; q += 16) {
        FragmentA<T> left[kDown];
        FragmentB<T> right[kAcross];
        ORTRAIN_UNROLL
        for (int i = 0; i < kDown; ++i) {
          const int at = warp_row() + 16 * i;
          if constexpr (kTransA) {
            left[i].load_transposed(part_a + q * Base::PartA::kLd + at, Base::PartA::kLd);
          } else {
            left[i].load(part_a + at * Base::PartA::kLd + q, Base::PartA::kLd);
          }
        }
        ORTRAIN_UNROLL
        for (int j = 0; j < kAcross; ++j) {
          const int at = warp_column() + 16 * j;
          if constexpr (kTransB) {
            right[j].load_transposed(part_b + at * Base::PartB::kLd + q, Base::PartB::kLd);
          } else {
            right[j].load(part_b + q * Base::PartB::kLd + at, Base::PartB::kLd);
          }
        }
        ORTRAIN_UNROLL
        for (int i = 0; i < kDown; ++i) {
          ORTRAIN_UNROLL
          for (int j = 0; j < kAcross; ++j) multiply_add(sums_[i][j], left[i], right[j]);
        }
      }
    });
  }

  // Calls body(row, column, sum) for every element of the tile, by whichever thread, neighbours in
  // a row by neighbours. The sums go through shared memory, a slab of each warp at a time. May be
  // called once per product.
  template <class Body>
  ORTRAIN_DEVICE void each_sum(const Body& body) const {
    float* slab = dynamic_shared<float>() + warp() * 16 * kSlabLd;
    ORTRAIN_UNROLL
    for (int i = 0; i < kDown; ++i) {
      warp_barrier();
      ORTRAIN_UNROLL
      for (int j = 0; j < kAcross; ++j) {
        ORTRAIN_UNROLL
        for (int e = 0; e < Accumulator::kElements; ++e) {
          slab[Accumulator::row_of(e) * kSlabLd + 16 * j + Accumulator::column_of(e)] =
              sums_[i][j][e];
        }
      }
      warp_barrier();
      ORTRAIN_ROLL
      for (int at = lane(); at < 16 * kWarpN; at += kWarpSize) {
        const int row = at / kWarpN, column = at % kWarpN;
        body(warp_row() + 16 * i + row, warp_column() + column, slab[row * kSlabLd + column]);
      }
    }
    __syncthreads();
  }

 private:
  ORTRAIN_DEVICE static int warp_row() { return warp() / (kN / kWarpN) * kWarpM; }
  ORTRAIN_DEVICE static int warp_column() { return warp() % (kN / kWarpN) * kWarpN; }

  Accumulator sums_[kDown][kAcross];
};

// By ordinary arithmetic in T: 16 x 16 threads with kEach x kEach sums each.
template <class T, int kEach, bool kTransA, bool kTransB>
class ScalarTile : public StagedTile<T, 16 * kEach, 16 * kEach, 16, 256, 2, kTransA, kTransB> {
  using Base = StagedTile<T, 16 * kEach, 16 * kEach, 16, 256, 2, kTransA, kTransB>;
  static constexpr int kVector = Base::PartA::kVector;
  static_assert(kEach % kVector == 0);

 public:
  using Value = T;

  ORTRAIN_DEVICE void multiply(const MatrixView<T>& a, const MatrixView<T>& b, int64_t row,
                               int64_t column, int64_t begin, int64_t end) {
    ORTRAIN_UNROLL
    for (int i = 0; i < kEach; ++i) {
      ORTRAIN_UNROLL
      for (int j = 0; j < kEach; ++j) sums_[i][j] = T{0};
    }
    Base::run(a, b, row, column, begin, end, [&](const T* part_a, const T* part_b) {
      ORTRAIN_UNROLL
      for (int q = 0; q < Base::kDepth; q += kVector) {
        T left[kVector][kEach], right[kVector][kEach];
        read<!kTransA, Base::PartA::kLd>(part_a, thread_row(), q, left);
        read<kTransB, Base::PartB::kLd>(part_b, thread_column(), q, right);
        ORTRAIN_UNROLL
        for (int v = 0; v < kVector; ++v) {
          ORTRAIN_UNROLL
          for (int i = 0; i < kEach; ++i) {
            ORTRAIN_UNROLL
            for (int j = 0; j < kEach; ++j) sums_[i][j] += left[v][i] * right[v][j];
          }
        }
      }
    });
  }

  // As above: a row of each thread at a time.
  template <class Body>
  ORTRAIN_DEVICE void each_sum(const Body& body) const {
    T* slab = dynamic_shared<T>();
    ORTRAIN_UNROLL
    for (int i = 0; i < kEach; ++i) {
      ORTRAIN_UNROLL
      for (int j = 0; j < kEach; ++j) {
        slab[thread_row() * Base::kColumns + place<kTransB>(thread_column(), j)] = sums_[i][j];
      }
      __syncthreads();
      ORTRAIN_ROLL
      for (int at = static_cast<int>(threadIdx.x); at < 16 * Base::kColumns; at += 256) {
        body(place<!kTransA>(at / Base::kColumns, i), at % Base::kColumns, slab[at]);
      }
      __syncthreads();
    }
  }

 private:
  ORTRAIN_DEVICE static int thread_row() { return static_cast<int>(threadIdx.x) / 16; }
  ORTRAIN_DEVICE static int thread_column() { return static_cast<int>(threadIdx.x) % 16; }

  // The row or column of the tile that is number i of a thread: next to each other in vectors where
  // memory has them so, else one thread's beside the other's.
  template <bool kInnerContiguous>
  ORTRAIN_DEVICE static constexpr int place(int thread, int i) {
    return kInnerContiguous ? thread + 16 * i
                            : i / kVector * 16 * kVector + thread * kVector + i % kVector;
  }

  // Inner positions q to q + kVector - 1 of this thread's rows or columns.
  template <bool kInnerContiguous, int kLd>
  ORTRAIN_DEVICE static void read(const T* part, int thread, int q, T (&values)[kVector][kEach]) {
    if constexpr (kInnerContiguous) {
      ORTRAIN_UNROLL
      for (int i = 0; i < kEach; ++i) {
        const auto vector = *reinterpret_cast<const Vector16<T>*>(
            part + place<kInnerContiguous>(thread, i) * kLd + q);
        ORTRAIN_UNROLL
        for (int v = 0; v < kVector; ++v) values[v][i] = vector.values[v];
      }
    } else {
      ORTRAIN_UNROLL
      for (int v = 0; v < kVector; ++v) {
        ORTRAIN_UNROLL
        for (int i = 0; i < kEach; i += kVector) {
          const auto vector = *reinterpret_cast<const Vector16<T>*>(
              part + (q + v) * kLd + place<kInnerContiguous>(thread, i));
          ORTRAIN_UNROLL
          for (int e = 0; e < kVector; ++e) values[v][i + e] = vector.values[e];
        }
      }
    }
  }

  T sums_[kEach][kEach];
};

// The tiles for elements of type T: kLarge where there is work for the whole device in them.
template <class T, bool kLarge, bool kTransA, bool kTransB>
struct TileOf {
  using Type = ScalarTile<T, (kLarge && sizeof(T) == 4 ? 8 : 4), kTransA, kTransB>;
};
#if defined(__HIPCC__)
inline constexpr int kLargeWarpColumns = 64;  // four warps of 64 lanes
#else
inline constexpr int kLargeWarpColumns = 32;  // eight warps of 32 lanes
#endif
template <bool kTransA, bool kTransB>
struct TileOf<Float16, true, kTransA, kTransB> {
  using Type = TensorTile<Float16, 128, 128, 64, kLargeWarpColumns, kTransA, kTransB>;
};
template <bool kTransA, bool kTransB>
struct TileOf<BFloat16, true, kTransA, kTransB> {
  using Type = TensorTile<BFloat16, 128, 128, 64, kLargeWarpColumns, kTransA, kTransB>;
};
template <bool kTransA, bool kTransB>
struct TileOf<Float16, false, kTransA, kTransB> {
  using Type = TensorTile<Float16, 64, 64, 32, 32, kTransA, kTransB>;
};
template <bool kTransA, bool kTransB>
struct TileOf<BFloat16, false, kTransA, kTransB> {
  using Type = TensorTile<BFloat16, 64, 64, 32, 32, kTransA, kTransB>;
};

}  // namespace ortrain::gpu
