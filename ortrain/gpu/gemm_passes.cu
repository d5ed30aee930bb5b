// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "ortrain/gpu/gemm_tiled.h"

namespace ortrain::gpu {
namespace {

constexpr double kRootHalf = 0.70710678118654752440;       // sqrt(1/2)
constexpr double kRootTwoOverPi = 0.79788456080286535588;  // sqrt(2/pi)
constexpr double kCubic = 0.044715;

template <class C>
ORTRAIN_DEVICE C activate(Activation activation, C x) {
  switch (activation) {
    case Activation::relu:
      return x > C(0) || x != x ? x : C(0);
    case Activation::gelu:
      return C(0.5) * x * (C(1) + erf(x * C(kRootHalf)));
    case Activation::gelu_tanh: {
      const C inner = C(kRootTwoOverPi) * (x + C(kCubic) * x * x * x);
      return C(0.5) * x * (C(1) + tanh(inner));
    }
    default:
      return x;
  }
}

template <class C>
ORTRAIN_DEVICE C derivative(Activation activation, C x) {
  switch (activation) {
    case Activation::relu:
      return x > C(0) ? C(1) : C(0);
    case Activation::gelu: {
      // Phi(x) + x phi(x), phi = sqrt(2/pi) / 2 exp(-x^2 / 2)
      const C density = C(0.5) * C(kRootTwoOverPi) * exp(C(-0.5) * x * x);
      return C(0.5) * (C(1) + erf(x * C(kRootHalf))) + x * density;
    }
    case Activation::gelu_tanh: {
      const C t = tanh(C(kRootTwoOverPi) * (x + C(kCubic) * x * x * x));
      const C slope = C(kRootTwoOverPi) * (C(1) + C(3) * C(kCubic) * x * x);
      return C(0.5) * (C(1) + t) + C(0.5) * x * (C(1) - t * t) * slope;
    }
    default:
      return C(1);
  }
}

template <class T>
__global__ void activate_rows(Activation activation, bool gradient, int64_t rows, int64_t columns,
                              int64_t ld, T* d, T* aux) {
  using C = ComputeType<T>;
  for_each_item(rows * columns, [&](int64_t i) {
    const int64_t at = i / columns * ld + i % columns;
    const C z = static_cast<C>(d[at]);
    if (gradient) {
      d[at] = static_cast<T>(z * derivative(activation, static_cast<C>(aux[at])));
      return;
    }
    if (aux != nullptr) aux[at] = d[at];
    d[at] = static_cast<T>(activate(activation, z));
  });
}

constexpr int kWide = 32, kHigh = 8;  // threads of a block of sum_column_part

// Sums of 32 columns over the rows of part blockIdx.y, to result[part][column].
template <class T, class Result>
__global__ void sum_column_part(int64_t rows, int64_t columns, int64_t ld, int64_t part_rows,
                                const T* d, Result* result) {
  using C = ComputeType<T>;
  __shared__ C sums[kHigh][kWide];
  const int x = static_cast<int>(threadIdx.x) % kWide, y = static_cast<int>(threadIdx.x) / kWide;
  const int64_t column = int64_t{blockIdx.x} * kWide + x;
  const int64_t begin = blockIdx.y * part_rows;
  const int64_t end = begin + part_rows < rows ? begin + part_rows : rows;
  C sum = 0;
  if (column < columns) {
    for (int64_t row = begin + y; row < end; row += kHigh) {
      sum += static_cast<C>(d[row * ld + column]);
    }
  }
  sums[y][x] = sum;
  __syncthreads();
  if (y > 0 || column >= columns) return;
  for (int other = 1; other < kHigh; ++other) sum += sums[other][x];
  result[blockIdx.y * columns + column] = static_cast<Result>(sum);
}

// Rows in one part, so that blocks fill the device and the parts are few.
int64_t rows_of_part(const GemmProblem& p) {
  constexpr int64_t kMostParts = 256, kLeastRows = 64;
  return std::max(kLeastRows, (p.m + kMostParts - 1) / kMostParts);
}
int64_t parts_of_rows(const GemmProblem& p) {
  return std::max<int64_t>((p.m + rows_of_part(p) - 1) / rows_of_part(p), 1);
}

template <class T>
__global__ void spread(int64_t m, int64_t n, BatchAxes batch, const T* c, int64_t c_row,
                       int64_t c_column, T* d, int64_t ldd) {
  for_each_item(batch.count * m * n, [&](int64_t i) {
    const BatchAxis offsets = batch.at(i / (m * n));
    const int64_t row = i % (m * n) / n, column = i % n;
    d[offsets.d + row * ldd + column] = c[offsets.c + row * c_row + column * c_column];
  });
}

}  // namespace

void apply_activation(const GemmProblem& p, const GemmOperands& operands, void* stream) {
  if (p.activation == Activation::none) return;
  dispatch_float(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* aux = p.keep_aux || p.activation_gradient ? static_cast<T*>(operands.aux) : nullptr;
    launch(activate_rows<T>, items(p.m * p.n), stream, p.activation, p.activation_gradient, p.m,
           p.n, p.ldd, static_cast<T*>(operands.d), aux);
  });
}

ByteCount column_sum_workspace(const GemmProblem& p) {
  const int64_t parts = parts_of_rows(p);
  return parts == 1 ? ByteCount() : bytes_of<double>(parts, p.n);
}

void sum_columns(const GemmProblem& p, const GemmOperands& operands, void* workspace,
                 void* stream) {
  dispatch_float(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    const auto* d = static_cast<const T*>(operands.d);
    auto* result = static_cast<T*>(operands.bias_gradient);
    const int64_t parts = parts_of_rows(p);
    LaunchShape shape{.blocks = block_count((p.n + kWide - 1) / kWide),
                      .threads = kWide * kHigh,
                      .blocks_y = static_cast<unsigned>(parts)};
    if (parts == 1) {
      launch(sum_column_part<T, T>, shape, stream, p.m, p.n, p.ldd, p.m, d, result);
      return;
    }
    auto* partial = static_cast<C*>(workspace);
    launch(sum_column_part<T, C>, shape, stream, p.m, p.n, p.ldd, rows_of_part(p), d, partial);
    shape.blocks_y = 1;
    launch(sum_column_part<C, T>, shape, stream, parts, p.n, p.n, parts, partial, result);
  });
}

void spread_addend(const GemmProblem& p, const GemmOperands& operands, void* stream) {
  const BatchAxes batch(p.batch);
  dispatch_float(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(spread<T>, items(batch.count * p.m * p.n), stream, p.m, p.n, batch,
           static_cast<const T*>(operands.c), p.c_row, p.c_column, static_cast<T*>(operands.d),
           p.ldd);
  });
}

}  // namespace ortrain::gpu
