// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/reduction.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/odometer.h"
#include "ortrain/cpu/storage.h"
#include "ortrain/cpu/threads.h"

namespace ortrain::cpu {
namespace {

constexpr int64_t kRun = 16384;         // longest run added up in the element type
constexpr int64_t kGroup = 8192;        // elements that are worth a partial result
constexpr int64_t kTileColumns = 1024;  // accumulators of a column tile: stay in L1
constexpr int64_t kMaxGroupRows = 1024;

// Floats accumulate in double, integers in 64 bits.
template <typename T>
using Accumulator = std::conditional_t<std::is_floating_point_v<ComputeType<T>>, double,
                                       std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;

// Integer sums and products are meant modulo 2^64; signed overflow would be undefined.
template <typename A>
A wrapping_add(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    return static_cast<A>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  } else {
    return a + b;
  }
}

template <typename A>
A wrapping_mul(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

template <typename A>
A step(ReduceKind kind, A state, A x) {
  switch (kind) {
    case ReduceKind::sum:
      return wrapping_add(state, x);
    case ReduceKind::sum_abs:
      return wrapping_add(state, x < A{0} ? wrapping_mul(x, A(-1)) : x);
    case ReduceKind::sum_squares:
      return wrapping_add(state, wrapping_mul(x, x));
    case ReduceKind::product:
      return wrapping_mul(state, x);
    case ReduceKind::maximum:
      return x > state || x != x ? x : state;
    case ReduceKind::minimum:
      return x < state || x != x ? x : state;
  }
  return state;
}

// Joins partial results, to which the transformation of the elements was applied already.
double join(ReduceKind kind, double a, double b) {
  const bool sums = kind == ReduceKind::sum_abs || kind == ReduceKind::sum_squares;
  return step(sums ? ReduceKind::sum : kind, a, b);
}

template <typename T, typename A>
A identity_of(ReduceKind kind) {
  using Limits = std::numeric_limits<T>;
  if (kind == ReduceKind::product) return A{1};
  if (kind != ReduceKind::maximum && kind != ReduceKind::minimum) return A{0};
  const bool lowest = kind == ReduceKind::maximum;
  if constexpr (std::is_integral_v<T>) {
    return static_cast<A>(lowest ? Limits::lowest() : Limits::max());
  } else {
    const A infinity = std::numeric_limits<A>::infinity();
    return lowest ? -infinity : infinity;
  }
}

// Logarithms of nothing and roots of sums that wrapped have no integer value.
template <typename A>
A saturated(double value) {
  if constexpr (std::is_integral_v<A>) {
    using Limits = std::numeric_limits<A>;
    if (value != value) return 0;
    if (value <= static_cast<double>(Limits::lowest())) return Limits::lowest();
    if (value >= std::ldexp(1.0, Limits::digits)) return Limits::max();
  }
  return static_cast<A>(value);
}

template <typename T, typename A>
T finished(ReduceFinish finish, A value, int64_t count) {
  switch (finish) {
    case ReduceFinish::none:
      break;
    case ReduceFinish::mean:
      value = static_cast<A>(value / static_cast<A>(count));
      break;
    case ReduceFinish::sqrt:
      value = saturated<A>(std::sqrt(static_cast<double>(value)));
      break;
    case ReduceFinish::log:
      value = saturated<A>(std::log(static_cast<double>(value)));
      break;
  }
  if constexpr (sizeof(T) == 2 && std::is_floating_point_v<A>) {
    return T(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

void check_layout(const NodeSpec& spec, ReduceFormula formula, const ReductionLayout& layout) {
  Odometer::check_rank(std::max(layout.kept_dims.size(), layout.reduced_dims.size()));
  const bool divides = formula.finish == ReduceFinish::mean || formula.finish == ReduceFinish::log;
  if (layout.count == 0 && layout.outputs > 0 && divides && !is_float(spec.input(0).dtype)) {
    throw ShapeError(str("nothing to reduce in ", tensor_spec_str(spec.input(0)),
                         ": the result has no integer value"));
  }
}

template <typename T>
KernelFn reduce_ref(ReduceFormula formula, ReductionLayout layout) {
  using A = Accumulator<T>;
  // The innermost reduced axis runs in the loop, the others in an odometer.
  const int64_t inner = layout.reduced_dims.empty() ? 1 : layout.reduced_dims.back();
  const int64_t stride = layout.reduced_strides.empty() ? 0 : layout.reduced_strides.back();
  if (!layout.reduced_dims.empty()) {
    layout.reduced_dims.pop_back();
    layout.reduced_strides.pop_back();
  }
  const int64_t runs = inner == 0 ? 0 : layout.count / inner;
  return [=, layout = std::move(layout)](const KernelArgs& args) {
    const T* in = args.input<T>(0);
    T* out = args.output<T>(0);
    parallel_for(layout.outputs, 16384 / std::max<int64_t>(layout.count, 1) + 1,
                 [&](int64_t begin, int64_t end) {
                   Odometer output(layout.kept_dims, layout.kept_strides, begin);
                   for (int64_t o = begin; o < end; ++o, output.next()) {
                     A state = identity_of<T, A>(formula.kind);
                     if (runs > 0) {
                       Odometer run(layout.reduced_dims, layout.reduced_strides, 0);
                       for (int64_t r = 0; r < runs; ++r, run.next()) {
                         const T* at = in + output.offset() + run.offset();
                         for (int64_t i = 0; i < inner; ++i) {
                           state = step(formula.kind, state, static_cast<A>(at[i * stride]));
                         }
                       }
                     }
                     out[o] = finished<T, A>(formula.finish, state, layout.count);
                   }
                 });
  };
}

// A block of elements as float or double: itself, or widened into `buffer`.
template <typename T>
const ComputeType<T>* as_compute(const T* x, int64_t n, ComputeType<T>* buffer) {
  if constexpr (sizeof(T) == 2) {
    const Storage storage = std::is_same_v<T, BFloat16> ? Storage::kBF16 : Storage::kF16;
    widen(storage, reinterpret_cast<const uint16_t*>(x), buffer, n);
    return buffer;
  } else {
    return x;
  }
}

constexpr int64_t kWiden = 1024;

template <typename T>
double run_of(ReduceKind kind, const T* x, int64_t n) {
  if constexpr (sizeof(T) != 2) {
    return reduce_run(kind, x, n);
  } else {
    alignas(64) float buffer[kWiden];
    double total = identity_of<T, double>(kind);
    for (int64_t i = 0; i < n; i += kWiden) {
      const int64_t count = std::min(kWiden, n - i);
      total = join(kind, total, reduce_run(kind, as_compute(x + i, count, buffer), count));
    }
    return total;
  }
}

// Rows shorter than a few vectors that lie one behind the other are taken many at a time.
constexpr int64_t kShortRow = 32;
constexpr int64_t kFolded = 256;

template <typename T>
void rows_of(ReduceKind kind, const T* x, int64_t row_stride, int64_t rows, int64_t columns,
             ComputeType<T>* into) {
  const int64_t fold = kFolded / columns;
  if (row_stride == columns && columns <= kShortRow && rows >= 2 * fold) {
    using A = ComputeType<T>;
    alignas(64) A wide[kFolded];
    std::fill_n(wide, fold * columns, static_cast<A>(identity_of<T, double>(kind)));
    rows_of(kind, x, fold * columns, rows / fold, fold * columns, wide);
    for (int64_t i = 0; i < fold * columns; ++i) {
      into[i % columns] = static_cast<A>(
          join(kind, static_cast<double>(into[i % columns]), static_cast<double>(wide[i])));
    }
    x += rows / fold * fold * columns;
    rows %= fold;
  }
  if constexpr (sizeof(T) != 2) {
    reduce_rows(kind, x, row_stride, rows, columns, into);
  } else {
    alignas(64) float buffer[kTileColumns];
    for (int64_t r = 0; r < rows; ++r) {
      reduce_rows(kind, as_compute(x + r * row_stride, columns, buffer), 0, 1, columns, into);
    }
  }
}

// Short rows one behind the other: a plain loop in double, without a call per row.
template <ReduceKind kKind, typename T>
void short_rows(const T* x, int64_t rows, int64_t length, ReduceFinish finish, T* out) {
  for (int64_t r = 0; r < rows; ++r, x += length) {
    double total = identity_of<T, double>(kKind);
    for (int64_t i = 0; i < length; ++i) {
      total = step(kKind, total, static_cast<double>(static_cast<ComputeType<T>>(x[i])));
    }
    out[r] = finished<T, double>(finish, total, length);
  }
}

template <typename T>
KernelFn reduce_short_rows(ReduceFormula formula, int64_t outputs, int64_t length) {
  return [=](const KernelArgs& args) {
    parallel_for(outputs, 16384 / length + 1, [&](int64_t begin, int64_t end) {
      const T* x = args.input<T>(0) + begin * length;
      T* out = args.output<T>(0) + begin;
      const int64_t rows = end - begin;
      switch (formula.kind) {
        case ReduceKind::sum:
          return short_rows<ReduceKind::sum>(x, rows, length, formula.finish, out);
        case ReduceKind::sum_abs:
          return short_rows<ReduceKind::sum_abs>(x, rows, length, formula.finish, out);
        case ReduceKind::sum_squares:
          return short_rows<ReduceKind::sum_squares>(x, rows, length, formula.finish, out);
        case ReduceKind::maximum:
          return short_rows<ReduceKind::maximum>(x, rows, length, formula.finish, out);
        default:
          return short_rows<ReduceKind::minimum>(x, rows, length, formula.finish, out);
      }
    });
  };
}

// The last axis is reduced: every output is a number of contiguous runs, split into groups.
template <typename T>
KernelFn reduce_by_runs(NodeSpec& spec, ReduceFormula formula, ReductionLayout layout) {
  const int64_t length = layout.reduced_dims.empty() ? 1 : layout.reduced_dims.back();
  if (!layout.reduced_dims.empty()) {
    layout.reduced_dims.pop_back();
    layout.reduced_strides.pop_back();
  }
  const int64_t piece = std::min(length, kRun);
  const int64_t pieces_per_run = (length + piece - 1) / piece;
  const int64_t pieces = layout.count / length * pieces_per_run;
  const int64_t group = std::max<int64_t>(1, kGroup / piece);  // pieces
  const int64_t groups = (pieces + group - 1) / group;
  if (groups > 1) {
    spec.request_workspace(bytes_of<double>(layout.outputs, groups));
  }
  return [=, layout = std::move(layout)](const KernelArgs& args) {
    const T* in = args.input<T>(0);
    T* out = args.output<T>(0);
    double* partial = static_cast<double*>(args.workspace);
    const int64_t work = std::min(layout.count, group * piece);
    parallel_for(layout.outputs * groups, 16384 / work + 1, [&](int64_t begin, int64_t end) {
      Odometer output(layout.kept_dims, layout.kept_strides, begin / groups);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t first = unit % groups * group;
        const int64_t last = std::min(first + group, pieces);
        double total = identity_of<T, double>(formula.kind);
        Odometer run(layout.reduced_dims, layout.reduced_strides, first / pieces_per_run);
        for (int64_t p = first; p < last; ++p) {
          const int64_t start = p % pieces_per_run * piece;
          const double value = run_of(formula.kind, in + output.offset() + run.offset() + start,
                                      std::min(piece, length - start));
          total = join(formula.kind, total, value);
          if ((p + 1) % pieces_per_run == 0) run.next();
        }
        if (groups > 1) {
          partial[unit] = total;
        } else {
          out[unit] = finished<T, double>(formula.finish, total, layout.count);
        }
        if ((unit + 1) % groups == 0) output.next();
      }
    });
    if (groups == 1) return;
    parallel_for(layout.outputs, 16384 / groups + 1, [&](int64_t begin, int64_t end) {
      for (int64_t o = begin; o < end; ++o) {
        double total = partial[o * groups];
        for (int64_t g = 1; g < groups; ++g) {
          total = join(formula.kind, total, partial[o * groups + g]);
        }
        out[o] = finished<T, double>(formula.finish, total, layout.count);
      }
    });
  };
}

// The last axis is kept: rows of accumulators, tiles of columns, groups of rows.
template <typename T>
KernelFn reduce_by_columns(NodeSpec& spec, ReduceFormula formula, ReductionLayout layout) {
  using A = ComputeType<T>;
  const int64_t columns = layout.kept_dims.back();
  layout.kept_dims.pop_back();
  layout.kept_strides.pop_back();
  const int64_t outer = layout.outputs / columns;
  const int64_t rows = layout.reduced_dims.back();
  const int64_t row_stride = layout.reduced_strides.back();
  layout.reduced_dims.pop_back();
  layout.reduced_strides.pop_back();
  const int64_t blocks = layout.count / rows;  // of `rows` rows each
  const int64_t tile = std::min(columns, kTileColumns);
  const int64_t tiles = (columns + tile - 1) / tile;
  // A group is part of a block or a number of whole blocks; there are enough of them to share the
  // work when columns are few.
  const int64_t wanted = std::max<int64_t>(1, 32 / (outer * tiles));
  const int64_t group =
      std::min(std::max((layout.count + wanted - 1) / wanted, kGroup / tile + 1), kMaxGroupRows);
  const int64_t piece = std::min(group, rows);  // rows
  const int64_t pieces_per_block = (rows + piece - 1) / piece;
  const int64_t pieces = blocks * pieces_per_block;
  const int64_t pieces_per_group = std::max<int64_t>(1, group / piece);
  const int64_t groups = (pieces + pieces_per_group - 1) / pieces_per_group;
  if (groups > 1) {
    spec.request_workspace(bytes_of<double>(outer, groups, columns));
  }
  return [=, layout = std::move(layout)](const KernelArgs& args) {
    const T* in = args.input<T>(0);
    T* out = args.output<T>(0);
    double* partial = static_cast<double*>(args.workspace);
    const int64_t work = tile * group;
    // unit = (outer, group, tile)
    parallel_for(outer * groups * tiles, 16384 / work + 1, [&](int64_t begin, int64_t end) {
      alignas(64) A sums[kTileColumns];
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t o = unit / tiles / groups;
        const int64_t g = unit / tiles % groups;
        const int64_t column = unit % tiles * tile;
        const int64_t width = std::min(tile, columns - column);
        const T* base = in + Odometer(layout.kept_dims, layout.kept_strides, o).offset() + column;
        std::fill_n(sums, width, static_cast<A>(identity_of<T, double>(formula.kind)));
        const int64_t first = g * pieces_per_group;
        Odometer block(layout.reduced_dims, layout.reduced_strides, first / pieces_per_block);
        for (int64_t p = first; p < std::min(first + pieces_per_group, pieces); ++p) {
          const int64_t row = p % pieces_per_block * piece;
          rows_of(formula.kind, base + block.offset() + row * row_stride, row_stride,
                  std::min(piece, rows - row), width, sums);
          if ((p + 1) % pieces_per_block == 0) block.next();
        }
        if (groups > 1) {
          double* to = partial + (o * groups + g) * columns + column;
          for (int64_t c = 0; c < width; ++c) to[c] = static_cast<double>(sums[c]);
        } else {
          T* to = out + o * columns + column;
          for (int64_t c = 0; c < width; ++c) {
            to[c] = finished<T, double>(formula.finish, static_cast<double>(sums[c]), layout.count);
          }
        }
      }
    });
    if (groups == 1) return;
    parallel_for(outer * columns, 16384 / groups + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const double* from = partial + i / columns * groups * columns + i % columns;
        double total = from[0];
        for (int64_t g = 1; g < groups; ++g) total = join(formula.kind, total, from[g * columns]);
        out[i] = finished<T, double>(formula.finish, total, layout.count);
      }
    });
  };
}

}  // namespace

ReductionLayout reduction_layout(const Dims& dims, const std::vector<bool>& reduced) {
  check(dims.size() == reduced.size(), "one mark per axis");
  const Dims strides = strides_of(dims);
  ReductionLayout layout;
  std::optional<bool> previous;
  for (size_t k = 0; k < dims.size(); ++k) {
    (reduced[k] ? layout.count : layout.outputs) *= dims[k];
    if (dims[k] == 1) continue;
    Dims& group_dims = reduced[k] ? layout.reduced_dims : layout.kept_dims;
    Dims& group_strides = reduced[k] ? layout.reduced_strides : layout.kept_strides;
    if (previous == reduced[k]) {
      group_dims.back() *= dims[k];
      group_strides.back() = strides[k];
    } else {
      group_dims.push_back(dims[k]);
      group_strides.push_back(strides[k]);
    }
    previous = reduced[k];
  }
  return layout;
}

KernelFn make_reduce_ref(NodeSpec& spec, ReduceFormula formula, const std::vector<bool>& reduced) {
  ReductionLayout layout = reduction_layout(spec.input(0).dims, reduced);
  check_layout(spec, formula, layout);
  if (layout.outputs == 0) return [](const KernelArgs&) {};
  return dispatch_all(spec.input(0).dtype, [&](auto tag) {
    return reduce_ref<typename decltype(tag)::type>(formula, std::move(layout));
  });
}

KernelFn make_reduce_blocked(NodeSpec& spec, ReduceFormula formula,
                             const std::vector<bool>& reduced) {
  check(formula.kind != ReduceKind::product, "products have no blocked kernel");
  ReductionLayout layout = reduction_layout(spec.input(0).dims, reduced);
  check_layout(spec, formula, layout);
  if (layout.count == 0 || layout.outputs == 0) return make_reduce_ref(spec, formula, reduced);
  const bool short_rows = layout.count <= kShortRow &&
                          layout.outputs * layout.count == spec.input(0).numel() &&
                          layout.kept_dims.size() <= 1 && layout.reduced_dims.size() <= 1 &&
                          (layout.reduced_strides.empty() || layout.reduced_strides[0] == 1);
  const bool by_columns = !layout.reduced_strides.empty() && layout.reduced_strides.back() != 1;
  return dispatch_float(spec.input(0).dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (short_rows) return reduce_short_rows<T>(formula, layout.outputs, layout.count);
    return by_columns ? reduce_by_columns<T>(spec, formula, std::move(layout))
                      : reduce_by_runs<T>(spec, formula, std::move(layout));
  });
}

}  // namespace ortrain::cpu
