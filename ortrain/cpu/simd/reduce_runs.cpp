// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/cpu/simd/reduce_runs.h"

#include <cmath>
#include <limits>

#include "ortrain/cpu/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ortrain/cpu/simd/reduce_runs.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ortrain::cpu {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Each: the identity, one step of the accumulator, and how two accumulators join.
struct Sum {
  static constexpr double kIdentity = 0;
  template <class V>
  static HWY_INLINE V Step(V sum, V x) {
    return hn::Add(sum, x);
  }
  template <class V>
  static HWY_INLINE V Join(V a, V b) {
    return hn::Add(a, b);
  }
  template <class T>
  static T ScalarStep(T sum, T x) {
    return sum + x;
  }
  static double ScalarJoin(double a, double b) { return a + b; }
};

struct SumAbs : Sum {
  template <class V>
  static HWY_INLINE V Step(V sum, V x) {
    return hn::Add(sum, hn::Abs(x));
  }
  template <class T>
  static T ScalarStep(T sum, T x) {
    return sum + std::abs(x);
  }
};

struct SumSquares : Sum {
  template <class V>
  static HWY_INLINE V Step(V sum, V x) {
    return hn::MulAdd(x, x, sum);
  }
  template <class T>
  static T ScalarStep(T sum, T x) {
    return sum + x * x;
  }
};

struct Maximum {
  static constexpr double kIdentity = -std::numeric_limits<double>::infinity();
  // A NaN accumulator is greater than nothing and equal to nothing: it stays; a NaN x goes in.
  template <class V>
  static HWY_INLINE V Step(V most, V x) {
    return hn::IfThenElse(hn::Or(hn::Gt(x, most), hn::IsNaN(x)), x, most);
  }
  template <class V>
  static HWY_INLINE V Join(V a, V b) {
    return Step(a, b);
  }
  template <class T>
  static T ScalarStep(T most, T x) {
    return x > most || x != x ? x : most;
  }
  static double ScalarJoin(double a, double b) { return ScalarStep(a, b); }
};

struct Minimum {
  static constexpr double kIdentity = std::numeric_limits<double>::infinity();
  template <class V>
  static HWY_INLINE V Step(V least, V x) {
    return hn::IfThenElse(hn::Or(hn::Lt(x, least), hn::IsNaN(x)), x, least);
  }
  template <class V>
  static HWY_INLINE V Join(V a, V b) {
    return Step(a, b);
  }
  template <class T>
  static T ScalarStep(T least, T x) {
    return x < least || x != x ? x : least;
  }
  static double ScalarJoin(double a, double b) { return ScalarStep(a, b); }
};

template <class Op, class T>
HWY_INLINE double Run(const T* x, int64_t n) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  double total = Op::kIdentity;
  int64_t i = 0;
  if (n >= lanes) {
    const auto identity = hn::Set(d, static_cast<T>(Op::kIdentity));
    auto a = identity, b = identity, c = identity, e = identity;
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
      a = Op::Step(a, hn::LoadU(d, x + i));
      b = Op::Step(b, hn::LoadU(d, x + i + lanes));
      c = Op::Step(c, hn::LoadU(d, x + i + 2 * lanes));
      e = Op::Step(e, hn::LoadU(d, x + i + 3 * lanes));
    }
    for (; i + lanes <= n; i += lanes) a = Op::Step(a, hn::LoadU(d, x + i));
    HWY_ALIGN T buffer[HWY_MAX_BYTES / sizeof(T)];
    hn::Store(Op::Join(Op::Join(a, b), Op::Join(c, e)), d, buffer);
    for (int64_t j = 0; j < lanes; ++j) {
      total = Op::ScalarJoin(total, static_cast<double>(buffer[j]));
    }
  }
  for (; i < n; ++i) total = Op::ScalarStep(total, static_cast<double>(x[i]));
  return total;
}

// Four rows at a time: memory is read in long runs, and each accumulator once per four rows.
template <class Op, class T>
HWY_INLINE void Rows(const T* x, int64_t row_stride, int64_t rows, int64_t columns, T* into) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t whole = columns - columns % lanes;
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const T* x0 = x + r * row_stride;
    const T* x1 = x0 + row_stride;
    const T* x2 = x1 + row_stride;
    const T* x3 = x2 + row_stride;
    for (int64_t c = 0; c < whole; c += lanes) {
      auto v = hn::LoadU(d, into + c);
      v = Op::Step(v, hn::LoadU(d, x0 + c));
      v = Op::Step(v, hn::LoadU(d, x1 + c));
      v = Op::Step(v, hn::LoadU(d, x2 + c));
      v = Op::Step(v, hn::LoadU(d, x3 + c));
      hn::StoreU(v, d, into + c);
    }
    for (int64_t c = whole; c < columns; ++c) {
      T v = Op::ScalarStep(into[c], x0[c]);
      v = Op::ScalarStep(v, x1[c]);
      v = Op::ScalarStep(v, x2[c]);
      into[c] = Op::ScalarStep(v, x3[c]);
    }
  }
  for (; r < rows; ++r) {
    const T* from = x + r * row_stride;
    for (int64_t c = 0; c < whole; c += lanes) {
      hn::StoreU(Op::Step(hn::LoadU(d, into + c), hn::LoadU(d, from + c)), d, into + c);
    }
    for (int64_t c = whole; c < columns; ++c) into[c] = Op::ScalarStep(into[c], from[c]);
  }
}

template <class T>
HWY_INLINE double DispatchRun(ReduceKind kind, const T* x, int64_t n) {
  switch (kind) {
    case ReduceKind::sum: return Run<Sum>(x, n);
    case ReduceKind::sum_abs: return Run<SumAbs>(x, n);
    case ReduceKind::sum_squares: return Run<SumSquares>(x, n);
    case ReduceKind::maximum: return Run<Maximum>(x, n);
    default: return Run<Minimum>(x, n);
  }
}

template <class T>
HWY_INLINE void DispatchRows(ReduceKind kind, const T* x, int64_t row_stride, int64_t rows,
                             int64_t columns, T* into) {
  switch (kind) {
    case ReduceKind::sum: return Rows<Sum>(x, row_stride, rows, columns, into);
    case ReduceKind::sum_abs: return Rows<SumAbs>(x, row_stride, rows, columns, into);
    case ReduceKind::sum_squares: return Rows<SumSquares>(x, row_stride, rows, columns, into);
    case ReduceKind::maximum: return Rows<Maximum>(x, row_stride, rows, columns, into);
    default: return Rows<Minimum>(x, row_stride, rows, columns, into);
  }
}

double RunF32(ReduceKind kind, const float* x, int64_t n) { return DispatchRun(kind, x, n); }
double RunF64(ReduceKind kind, const double* x, int64_t n) { return DispatchRun(kind, x, n); }
void RowsF32(ReduceKind kind, const float* x, int64_t row_stride, int64_t rows, int64_t columns,
             float* into) {
  DispatchRows(kind, x, row_stride, rows, columns, into);
}
void RowsF64(ReduceKind kind, const double* x, int64_t row_stride, int64_t rows, int64_t columns,
             double* into) {
  DispatchRows(kind, x, row_stride, rows, columns, into);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace ortrain::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ortrain::cpu {

HWY_EXPORT(RunF32);
HWY_EXPORT(RunF64);
HWY_EXPORT(RowsF32);
HWY_EXPORT(RowsF64);

double reduce_run(ReduceKind kind, const float* x, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(RunF32)(kind, x, n);
}
double reduce_run(ReduceKind kind, const double* x, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(RunF64)(kind, x, n);
}
void reduce_rows(ReduceKind kind, const float* x, int64_t row_stride, int64_t rows,
                 int64_t columns, float* into) {
  HWY_DYNAMIC_DISPATCH(RowsF32)(kind, x, row_stride, rows, columns, into);
}
void reduce_rows(ReduceKind kind, const double* x, int64_t row_stride, int64_t rows,
                 int64_t columns, double* into) {
  HWY_DYNAMIC_DISPATCH(RowsF64)(kind, x, row_stride, rows, columns, into);
}

}  // namespace ortrain::cpu
#endif  // HWY_ONCE
