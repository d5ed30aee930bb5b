// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <limits>

#include "ortrain/gpu/row_forms.h"

// The sum of exponentials of many numbers, made in one pass: relative to the largest so far.
namespace ortrain::gpu {

template <class C>
struct ExponentialSum {
  C top, sum;  // the sum of exp(x - top); of none: -inf and 0

  static ORTRAIN_DEVICE ExponentialSum none() {
    return {-std::numeric_limits<C>::infinity(), C{0}};
  }
  // -inf adds nothing; NaN makes the sum NaN.
  ORTRAIN_DEVICE void add(C value) {
    if (value == -std::numeric_limits<C>::infinity()) return;
    if (value > top) {
      sum *= static_cast<C>(exp(top - value));
      top = value;
    }
    sum += static_cast<C>(exp(value - top));
  }
  // The same for several, whose exponentials do not wait for each other.
  template <int kCount>
  ORTRAIN_DEVICE void add(const C (&values)[kCount]) {
    C highest = values[0];
    ORTRAIN_UNROLL
    for (int i = 1; i < kCount; ++i) highest = highest < values[i] ? values[i] : highest;
    if (kCount == 1 || !(highest > -std::numeric_limits<C>::infinity())) {
      ORTRAIN_UNROLL
      for (int i = 0; i < kCount; ++i) add(values[i]);
      return;
    }
    if (highest > top) {
      sum *= static_cast<C>(exp(top - highest));
      top = highest;
    }
    ORTRAIN_UNROLL
    for (int i = 0; i < kCount; ++i) sum += static_cast<C>(exp(values[i] - top));
  }
  ORTRAIN_DEVICE C log_sum() const { return top + static_cast<C>(::log(sum)); }
};

struct JoinExponentialSums {
  template <class C>
  ORTRAIN_DEVICE ExponentialSum<C> operator()(const ExponentialSum<C>& a,
                                              const ExponentialSum<C>& b) const {
    const C top = a.top < b.top ? b.top : a.top;
    // The same top must not be subtracted from itself: it may be infinite.
    const C left = a.top == top ? a.sum : a.sum * static_cast<C>(exp(a.top - top));
    const C right = b.top == top ? b.sum : b.sum * static_cast<C>(exp(b.top - top));
    return {top, left + right};
  }
};

// Of a whole row, known to all threads of its team.
template <class Form, class T>
ORTRAIN_DEVICE ExponentialSum<ComputeType<T>> row_exponentials(RowInput<T, Form>& row, int64_t n) {
  using C = ComputeType<T>;
  using Sum = ExponentialSum<C>;
  Sum own = Sum::none();
  if constexpr (!Form::kKept) {
    Form::for_each_pack(n, [&](int k, int64_t column) {
      const auto x = row.first(k, column);
      C values[Form::kWidth];
      ORTRAIN_UNROLL
      for (int i = 0; i < Form::kWidth; ++i) {
        values[i] = Form::has(column, i, n) ? static_cast<C>(x[i]) : Sum::none().top;
      }
      own.add(values);
    });
    return Form::Team::merge(own, Sum::none(), JoinExponentialSums());
  } else {
    // From registers two passes are cheaper than one that corrects its sum.
    C top = own.top;
    Form::for_each_pack(n, [&](int k, int64_t column) {
      const auto x = row.first(k, column);
      ORTRAIN_UNROLL
      for (int i = 0; i < Form::kWidth; ++i) {
        const C value = x[i];
        top = top < value ? value : top;
      }
    });
    top = Form::Team::reduce(top, Sum::none().top, Max());
    C sum = 0;
    Form::for_each_pack(n, [&](int k, int64_t column) {
      const auto x = row.again(k, column);
      ORTRAIN_UNROLL
      for (int i = 0; i < Form::kWidth; ++i) {
        const C value = x[i];
        sum += value == Sum::none().top ? C{0} : static_cast<C>(exp(value - top));
      }
    });
    return {top, Form::Team::reduce(sum, C{0}, ::ortrain::gpu::Sum())};
  }
}

}  // namespace ortrain::gpu
