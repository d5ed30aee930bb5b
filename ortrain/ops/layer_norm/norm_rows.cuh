// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include "ortrain/base/axis_split.h"
#include "ortrain/gpu/column_sums.h"

// Layer and RMS normalization of rows. kRms: the mean counts as 0.
namespace ortrain::gpu {

// x as rows that are normalized each: everything from `axis` on is one row.
struct NormShape {
  int64_t rows = 1, n = 1;
  NormShape(const Dims& dims, int64_t axis) {
    const size_t at = static_cast<size_t>(normalize_axis(axis, dims.size()));
    for (size_t i = 0; i < dims.size(); ++i) (i < at ? rows : n) *= dims[i];
  }
};

template <class C>
struct RowStatistics {
  C mean, rest, inv_std;  // the mean is mean + rest: the first is rounded where it is large
  ORTRAIN_DEVICE C normalized(C x) const { return (x - mean - rest) * inv_std; }
};

template <bool kRms, class Form, class T>
ORTRAIN_DEVICE RowStatistics<ComputeType<T>> row_statistics(RowInput<T, Form>& row, int64_t n,
                                                            ComputeType<T> epsilon) {
  using C = ComputeType<T>;
  const C count = static_cast<C>(n);
  C mean = 0;
  if constexpr (!kRms) {
    Form::for_each_pack(n, [&](int k, int64_t column) {
      const auto x = row.first(k, column);
      ORTRAIN_UNROLL
      for (int i = 0; i < Form::kWidth; ++i) mean += static_cast<C>(x[i]);
    });
    mean = Form::Team::reduce(mean, C{0}, Sum()) / count;
  }
  TwoSums<C> sums{0, 0};  // of x - mean and of its square
  Form::for_each_pack(n, [&](int k, int64_t column) {
    const auto x = kRms ? row.first(k, column) : row.again(k, column);
    ORTRAIN_UNROLL
    for (int i = 0; i < Form::kWidth; ++i) {
      const C distance = static_cast<C>(x[i]) - mean;
      if constexpr (!kRms) sums.first += distance;
      sums.second += distance * distance;
    }
  });
  C rest = 0;
  if constexpr (kRms) {
    sums.second = Form::Team::reduce(sums.second, C{0}, Sum());
  } else {
    sums = Form::Team::merge(sums, TwoSums<C>{0, 0}, AddBoth());
    rest = sums.first / count;
  }
  const C variance = sums.second / count - rest * rest;  // NaN stays one
  return {mean, rest, C{1} / static_cast<C>(sqrt((variance < C{0} ? C{0} : variance) + epsilon))};
}

// How `norm_rows` is run: rows of 1024 floats or 2048 halves by a warp each.
inline constexpr int kNormThreads = 1024, kNormPacks = 8;

// y and the statistics may be null. y may be x, but is neither scale nor bias.
template <bool kRms, class T, class Form>
__global__ void __launch_bounds__(Form::Team::kThreads)
    norm_rows(NormShape shape, ComputeType<T> epsilon, const T* x, const T* __restrict__ scale,
              const T* __restrict__ bias, T* y, ComputeType<T>* mean, ComputeType<T>* inv_std) {
  using C = ComputeType<T>;
  const int64_t n = shape.n;
  for (int64_t row = Form::Team::index(); row < shape.rows; row += Form::Team::count()) {
    RowInput<T, Form> in(x + row * n);
    const RowStatistics<C> of = row_statistics<kRms, Form>(in, n, epsilon);
    if (Form::Team::rank() == 0) {
      if (mean != nullptr) mean[row] = of.mean + of.rest;
      if (inv_std != nullptr) inv_std[row] = of.inv_std;
    }
    if (y == nullptr) continue;
    Form::for_each_pack(n, [&](int k, int64_t column) {
      auto pack = in.again(k, column);
      RowPack<C, Form::kWidth> value;
      ORTRAIN_UNROLL
      for (int i = 0; i < Form::kWidth; ++i) value[i] = of.normalized(static_cast<C>(pack[i]));
      if (scale != nullptr) {
        const auto by = load_pack<Form::kWidth>(scale + column);
        ORTRAIN_UNROLL
        for (int i = 0; i < Form::kWidth; ++i) value[i] *= static_cast<C>(by[i]);
      }
      if (bias != nullptr) {
        const auto add = load_pack<Form::kWidth>(bias + column);
        ORTRAIN_UNROLL
        for (int i = 0; i < Form::kWidth; ++i) value[i] += static_cast<C>(add[i]);
      }
      ORTRAIN_UNROLL
      for (int i = 0; i < Form::kWidth; ++i) pack[i] = static_cast<T>(value[i]);
      store_pack<Form::kWidth>(y + row * n + column, pack);
    });
  }
}

// --- gradient: with g = dy scale and h = (x - mean) inv_std:
//   dx = inv_std (g - mean(g) - h mean(g h)), dscale = sum(dy h), dbias = sum(dy)

template <class T>
struct NormGrad {
  using C = ComputeType<T>;
  NormShape shape;
  C epsilon;  // kRms: inv_std is made here
  const T *dy, *x, *scale;
  const C *mean, *inv_std;
  T* dx;
  // Where sums over rows go, [part, {dscale, dbias}, n]; null = none are wanted.
  C* partial;
};

template <bool kRms, class T, class Form>
__global__ void __launch_bounds__(Form::Team::kThreads) norm_grad_rows(NormGrad<T> a) {
  using C = ComputeType<T>;
  constexpr int kWidth = Form::kWidth;
  // Columns that this thread sees in every row; only where it sees the same ones each time.
  C dscale[Form::kKept ? Form::kPacks : 1][kWidth] = {};
  C dbias[Form::kKept && !kRms ? Form::kPacks : 1][kWidth] = {};
  const int64_t n = a.shape.n;
  const C count = static_cast<C>(n);
  const auto scaled = [&](int64_t column, const RowPack<T, kWidth>& dy) {
    RowPack<C, kWidth> g;
    ORTRAIN_UNROLL
    for (int i = 0; i < kWidth; ++i) g[i] = static_cast<C>(dy[i]);
    if (a.scale != nullptr) {
      const auto by = load_pack<kWidth>(a.scale + column);
      ORTRAIN_UNROLL
      for (int i = 0; i < kWidth; ++i) g[i] *= static_cast<C>(by[i]);
    }
    return g;
  };
  for (int64_t row = Form::Team::index(); row < a.shape.rows; row += Form::Team::count()) {
    RowInput<T, Form> gradient(a.dy + row * n), input(a.x + row * n);
    C mean = 0, inv_std = 0;
    if constexpr (!kRms) {
      mean = a.mean[row];
      inv_std = a.inv_std[row];
    }
    // sum(g) and sum(g h); kRms: sum(x^2) and sum(g x).
    TwoSums<C> sums{0, 0};
    Form::for_each_pack(n, [&](int k, int64_t column) {
      const auto g = scaled(column, gradient.first(k, column));
      const auto x = input.first(k, column);
      ORTRAIN_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        const C value = x[i];
        sums.first += kRms ? value * value : g[i];
        sums.second += g[i] * (kRms ? value : (value - mean) * inv_std);
      }
    });
    sums = Form::Team::merge(sums, TwoSums<C>{0, 0}, AddBoth());
    C mean_g = 0, mean_gh = 0;
    if constexpr (kRms) {
      inv_std = C{1} / static_cast<C>(sqrt(sums.first / count + a.epsilon));
      mean_gh = sums.second * inv_std / count;
    } else {
      mean_g = sums.first / count;
      mean_gh = sums.second / count;
    }
    Form::for_each_pack(n, [&](int k, int64_t column) {
      const auto dy = gradient.again(k, column);
      const auto x = input.again(k, column);
      RowPack<C, kWidth> h;
      ORTRAIN_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        h[i] = (static_cast<C>(x[i]) - mean) * inv_std;
        if constexpr (Form::kKept) {
          dscale[k][i] += static_cast<C>(dy[i]) * h[i];
          if constexpr (!kRms) dbias[k][i] += static_cast<C>(dy[i]);
        }
      }
      if (a.dx == nullptr) return;
      const auto g = scaled(column, dy);
      RowPack<T, kWidth> dx;
      ORTRAIN_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        dx[i] = static_cast<T>(inv_std * (g[i] - mean_g - h[i] * mean_gh));
      }
      store_pack<kWidth>(a.dx + row * n + column, dx);
    });
  }
  if constexpr (Form::kKept) {
    if (a.partial == nullptr) return;
    C* const own = a.partial + Form::Team::index() * (kRms ? 1 : 2) * n;
    Form::for_each_pack(n, [&](int k, int64_t column) {
      ORTRAIN_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        own[column + i] = dscale[k][i];
        if constexpr (!kRms) own[n + column + i] = dbias[k][i];
      }
    });
  }
}

// The sums alone, for rows that no registers hold: lanes on columns, warps on rows of a part.
template <bool kRms, class T>
__global__ void norm_grad_columns(NormGrad<T> a) {
  using C = ComputeType<T>;
  const int64_t n = a.shape.n, column = int64_t{blockIdx.x} * kWarpSize + lane();
  const int64_t step = int64_t{gridDim.y} * (blockDim.x / kWarpSize);
  TwoSums<C> sums{0, 0};
  if (column < n) {
    for (int64_t row = int64_t{blockIdx.y} * (blockDim.x / kWarpSize) + warp(); row < a.shape.rows;
         row += step) {
      const C dy = a.dy[row * n + column], x = a.x[row * n + column];
      sums.first += dy * (x - (kRms ? C{0} : a.mean[row])) * a.inv_std[row];
      sums.second += dy;
    }
  }
  sums = merge_warps(sums, AddBoth());
  if (warp() != 0 || column >= n) return;
  C* const own = a.partial + int64_t{blockIdx.y} * (kRms ? 1 : 2) * n + column;
  own[0] = sums.first;
  if (!kRms) own[n] = sums.second;
}

// How many parts the sums over rows are made in, and how much memory that takes.
template <bool kRms, class T>
struct NormGradPlan {
  using C = ComputeType<T>;
  static constexpr int kSums = kRms ? 1 : 2;
  static constexpr int kMostThreads = 512;

  static int64_t most_teams(int64_t rows) { return std::clamp<int64_t>(rows / 8, 256, 1024); }
  static int64_t column_parts(int64_t rows) { return std::clamp<int64_t>(rows / 64, 1, 128); }
  static ByteCount bytes(const NormShape& shape) {
    int64_t parts = 0;
    for (const bool aligned : {false, true}) {
      with_row_form<T, kMostThreads>(shape.n, aligned, [&](auto form) {
        using Form = decltype(form);
        parts = std::max(parts, Form::kKept
                                    ? row_teams<Form>(shape.rows, shape.n, most_teams(shape.rows))
                                    : column_parts(shape.rows));
      });
    }
    return bytes_of<C>(parts, kSums, shape.n) + bytes_of<C>(shape.rows);
  }

  // dscale and dbias may be null.
  static void run(NormGrad<T> a, const KernelArgs& args, T* dscale, T* dbias) {
    const NormShape shape = a.shape;
    const bool sums = dscale != nullptr || dbias != nullptr;
    C* const row_values = static_cast<C*>(args.workspace);
    a.partial = sums ? row_values + shape.rows : nullptr;
    const bool aligned = pack_aligned(a.dy, a.x, a.scale, a.dx);
    with_row_form<T, kMostThreads>(shape.n, aligned, [&](auto form) {
      using Form = decltype(form);
      int64_t parts = column_parts(shape.rows);
      const int64_t teams = Form::kKept && sums ? most_teams(shape.rows) : int64_t{1} << 20;
      if (Form::kKept && sums) parts = row_teams<Form>(shape.rows, shape.n, teams);
      if (!Form::kKept && sums) {
        // Before dx, which may lie where dy or x is.
        if constexpr (kRms) {
          launch(norm_rows<true, T, Form>, row_shape<Form>(shape.rows, shape.n), args.stream, shape,
                 a.epsilon, a.x, static_cast<const T*>(nullptr), static_cast<const T*>(nullptr),
                 static_cast<T*>(nullptr), static_cast<C*>(nullptr), row_values);
          a.inv_std = row_values;
        }
        launch(norm_grad_columns<kRms, T>,
               {.blocks = block_count((shape.n + kWarpSize - 1) / kWarpSize),
                .threads = kSumWarps * kWarpSize,
                .blocks_y = static_cast<unsigned>(parts)},
               args.stream, a);
      }
      if (a.dx != nullptr || Form::kKept) {
        launch(norm_grad_rows<kRms, T, Form>, row_shape<Form>(shape.rows, shape.n, teams),
               args.stream, a);
      }
      if (!sums) return;
      DeviceArray<T*, kSums> out;
      out[0] = dscale;
      if constexpr (!kRms) out[1] = dbias;
      launch_sum_parts<T, kSums>(args.stream, a.partial, parts, shape.n, out);
    });
  }
};

}  // namespace ortrain::gpu
