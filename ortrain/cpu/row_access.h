// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "ortrain/base/axis_split.h"
#include "ortrain/base/dtype_dispatch.h"
#include "ortrain/cpu/scratch.h"
#include "ortrain/cpu/storage.h"

namespace ortrain::cpu {

using ::ortrain::AxisSplit;

template <class T>
constexpr Storage kStorageOf = std::is_same_v<T, float>      ? Storage::kF32
                               : std::is_same_v<T, double>   ? Storage::kF64
                               : std::is_same_v<T, BFloat16> ? Storage::kBF16
                                                             : Storage::kF16;

// Rows of T in the type to compute in: in place for float and double, through scratch rows of the
// calling thread for the 16-bit types. `Count` buffers of n elements; make one per range of rows.
template <class T, int Count>
class RowAccess {
 public:
  using C = ComputeType<T>;
  static constexpr bool kDirect = std::is_same_v<T, C>;

  explicit RowAccess(int64_t n) : n_(n) {
    if constexpr (!kDirect) buffers_ = scratch<C>(ScratchSlot::kConvert, Count, n);
  }

  // The values of `row`.
  const C* read(int buffer, const T* row) {
    if constexpr (kDirect) {
      return row;
    } else {
      C* wide = buffers_ + buffer * n_;
      widen(kStorageOf<T>, reinterpret_cast<const uint16_t*>(row), wide, n_);
      return wide;
    }
  }
  // Where to compute the values of `row`; `write` puts them there.
  C* target(int buffer, T* row) {
    if constexpr (kDirect) {
      return row;
    } else {
      return buffers_ + buffer * n_;
    }
  }
  void write(int buffer, T* row) {
    if constexpr (!kDirect) {
      narrow(kStorageOf<T>, buffers_ + buffer * n_, reinterpret_cast<uint16_t*>(row), n_);
    }
  }

 private:
  int64_t n_;
  C* buffers_ = nullptr;
};

// Rows per range so that a thread gets enough elements to be worth waking.
inline int64_t row_grain(int64_t row_size) {
  constexpr int64_t kElements = 8192;
  return row_size >= kElements ? 1 : kElements / (row_size > 0 ? row_size : 1);
}

}  // namespace ortrain::cpu
