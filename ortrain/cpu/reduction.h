// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "ortrain/base/dim.h"
#include "ortrain/cpu/simd/reduce_runs.h"
#include "ortrain/runtime/kernel.h"

namespace ortrain::cpu {

// What becomes of the reduced value r over n elements.
enum class ReduceFinish { none, mean, sqrt, log };  // r, r / n, sqrt(r), log(r)

struct ReduceFormula {
  ReduceKind kind = ReduceKind::sum;
  ReduceFinish finish = ReduceFinish::none;
};

// The axes of a reduction, neighbours of one fate merged and axes of extent 1 left out.
struct ReductionLayout {
  Dims kept_dims, kept_strides;        // strides into the input; outputs are in row-major order
  Dims reduced_dims, reduced_strides;  // outermost first
  int64_t outputs = 1;
  int64_t count = 1;  // elements per output
};
ReductionLayout reduction_layout(const Dims& dims, const std::vector<bool>& reduced);

// Kernels that reduce input 0 over the marked axes into output 0. Any element type; sums and
// products of floats in double, of integers modulo 2^64; NaN wins a maximum or minimum. Nothing to
// reduce gives the identity: 0, 1, the lowest or the highest value.
KernelFn make_reduce_ref(NodeSpec& spec, ReduceFormula formula, const std::vector<bool>& reduced);

// The same for float types, all kinds but the product, by SIMD over rows or columns: in the
// element type (16-bit types: in float) within a block of at most 16384 rows or elements, between
// blocks in double. Blocks depend on the shape alone, so results do not on the number of threads.
KernelFn make_reduce_blocked(NodeSpec& spec, ReduceFormula formula,
                             const std::vector<bool>& reduced);

}  // namespace ortrain::cpu
